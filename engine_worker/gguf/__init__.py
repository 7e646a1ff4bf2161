"""Readers of GGUF files without torch: metadata, configuration, tokenizer and tensors."""
