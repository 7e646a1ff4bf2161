"""One process a GPU group: requests in, tokens out. Owns token ids and KV blocks; knows nothing of text or HTTP.

What runs here is half of each walk: behind a chat's way in, and before a token's way back.
"""
