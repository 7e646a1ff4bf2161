"""The contract between gateways and engine workers: messages, Redis names and scripts, settings, and logs.

Both programs communicate only through the store. This package imports neither of them, nor torch, nor HTTP libraries.
"""
