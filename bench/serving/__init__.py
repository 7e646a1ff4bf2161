"""Real processes under load over HTTP: ours, and others beside them."""
