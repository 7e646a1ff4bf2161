"""Execution of scheduled batches on the device: block moves, forward pass, and sampling.

Only this package owns device memory.
"""
