"""Speculative decoding: guess the next tokens of a sequence, and check several of them in one step.

A draft is kept exactly when it equals the token that the sampler draws at its place, which depends only on the
distribution, the seed and the output index. So the output is that of no speculation wherever logits have the same bits.
"""
