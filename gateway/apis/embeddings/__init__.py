"""Embeddings (OpenAI's), and scores of texts for a query (Jina's, Cohere's, and vLLM's)."""
