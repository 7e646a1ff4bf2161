"""One token for each row of scores: sample_tokens.py has the contract.

It is the first step of a token's way back. Nothing here knows sequences or requests.
"""
