"""Causal attention over a paged KV cache; paged_attention.py has the contract, the reference and the choice.

It is called once a layer in every step. Nothing here knows layers, sequences or requests.
"""
