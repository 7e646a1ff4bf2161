"""One process a GPU group: requests in, tokens out. Owns token ids and KV blocks; knows nothing of text or HTTP."""
