"""The lifecycle of one answer: submission, generation, delivery in each API's format, and retention."""
