"""Text to token ids and back: chat templates, tokenizers, stop strings. Pure; independent of HTTP and the store."""
