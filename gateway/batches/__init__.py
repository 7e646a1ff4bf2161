"""Files and batches: `storage` keeps them in a directory, and `driver`, a program, answers their lines."""
