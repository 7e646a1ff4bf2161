"""Text to token ids and back: templates, tokenizers, stop strings. Pure; knows neither HTTP nor the store."""
