"""Parsers that split a model's text into reasoning, tool calls, and content while it streams.

They run between detokenization and the response formats (gateway/apis). All of them are pure.
"""
