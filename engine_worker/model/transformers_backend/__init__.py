"""Decoders without a file of their own here, run by the package `transformers` with this engine's attention and KV."""
