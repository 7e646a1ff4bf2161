"""The network. Gets its inputs and KV tensors as arguments; no global context.

It is the forward pass in the middle of a step. Nothing here knows sequences, scheduling or sampling.
"""
