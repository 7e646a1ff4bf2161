"""The worker's only Redis code: claim, emit, finish, reap."""
