"""Decoders without a file of their own here, run by the package `transformers` with this engine's attention and KV.

It is used at a worker's start, and its forward pass in every step. Nothing outside knows of the package.
"""
