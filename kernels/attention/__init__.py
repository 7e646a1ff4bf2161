"""Causal attention over a paged KV cache; paged_attention.py has the contract, the reference and the dispatch."""
