"""Token sampling: one token per row of scores. sample_tokens.py has the contract."""
