"""One kernel at a time: its answers against a reference, its time against what the device reaches."""
