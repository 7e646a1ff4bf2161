"""Who runs in the next step and where their KV lives. Pure: no torch, no I/O, no clock.

It is the first half of every step, and a block's whole life. Nothing here knows tensors, text or the store.
"""
