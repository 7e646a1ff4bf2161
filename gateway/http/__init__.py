"""The bytes on a client's connection: bodies read within limits, events written to those who read them.

A token's way back ends here. Nothing here knows a model, a key or the store.
"""
