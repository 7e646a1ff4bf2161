"""Text to token ids and back: templates, tokenizers, stop strings. Pure; knows neither HTTP nor the store.

A chat's way in, where its prompt is made, and a token's way back, where it becomes text.
"""
