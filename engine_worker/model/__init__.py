"""The network. Gets its inputs and KV tensors as arguments; no global context."""
