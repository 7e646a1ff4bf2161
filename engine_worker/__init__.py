"""The engine worker: one process per GPU group, from claimed requests to published tokens.

It handles token ids and KV blocks; text and HTTP belong to the gateway.
"""
