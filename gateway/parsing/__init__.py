"""The meaning of a model's text: reasoning, tool calls and content, told apart as the text comes.

A token's way back, between its text (gateway/text) and what is written of it (gateway/answers). Nothing here knows a
request, HTTP or the store.
"""
