"""The worker's only Redis code: claim, emit, finish, reap.

It is both ends of a request in the worker, and all of a takeover. Nothing here knows the engine or text.
"""
