"""Ollama's API: chats and completions as lines of JSON, and the models."""
