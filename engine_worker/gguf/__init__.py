"""Readers of GGUF files, without torch: metadata, configuration, tokenizer and tensors. convert_gguf.py joins them.

It is used before a model is served for the first time; no request comes by. Nothing here knows the engine.
"""
