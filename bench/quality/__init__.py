"""The cost of formats of fewer bits, by an evaluation that is not ours: lm-eval."""
