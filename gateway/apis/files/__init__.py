"""`/v1/files` and `/v1/batches`: write and read records. A program of its own answers the lines of a batch."""
