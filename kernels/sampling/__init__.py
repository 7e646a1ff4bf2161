"""One token for each row of scores: sample_tokens.py has the contract."""
