"""The KV cache without tensors: its layout, the blocks of sequences, prefixes, swaps, events, and views."""
