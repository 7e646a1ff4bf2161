"""Turn logits into tokens: rules, penalties, grammars, log-probabilities, beam candidates."""
