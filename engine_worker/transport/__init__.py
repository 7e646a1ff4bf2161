"""The worker's Redis code: claims requests, emits tokens, finishes requests, and reaps dead workers."""
