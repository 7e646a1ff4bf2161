"""The served models: what is told of each at the start, what each has here, and which one a request means."""
