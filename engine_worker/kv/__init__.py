"""KV as values: the ground floor of the worker. Nothing here knows a sequence, a tensor or a device.

It is used beneath a block's walk, at a start and in every step.
"""
