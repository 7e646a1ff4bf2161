"""One request's life, from its submission to the last byte of its answer, in each format.

A chat's way in from its decoded body, and a token's way back from its stream. It knows no key of the store.
"""
