"""Tokenization, in vLLM's format."""
