"""The path of one request: checks and limits, submission, generation, delivery, and retention."""
