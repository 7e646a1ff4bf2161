"""Authentication and authorization: API keys, allowed origins, and rate limits. Nothing here reads a body."""
