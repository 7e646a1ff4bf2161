"""Names of request headers that several modules read."""

NAME_HEADER = "Idempotency-Key"
