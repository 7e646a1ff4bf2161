"""What a model's text means: thoughts, tool calls and content, told apart as the text comes."""
