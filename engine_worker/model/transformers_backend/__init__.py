"""Decoders without a family here, run by the package `transformers` with this engine's attention and KV cache."""
