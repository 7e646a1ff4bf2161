"""Draft heads: a layer with its own checkpoint that continues the target network's hidden states by some tokens."""
