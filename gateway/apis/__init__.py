"""The HTTP APIs: one folder each, with its request schema, response format, and routes."""
