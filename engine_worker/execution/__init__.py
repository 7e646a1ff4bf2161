"""Carries out a scheduled batch on the device. The only code that owns device memory.

It is the middle of every step, between the scheduler's batch and the tokens that come back. Nothing here knows a
request, the store or HTTP.
"""
