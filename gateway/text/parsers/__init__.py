"""Parsers that split a model's text into reasoning, tool calls, and content while it streams.

They run between detokenization (gateway/text) and the response formats (gateway/answers). All of them are pure.
"""
