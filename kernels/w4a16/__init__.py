"""Linear layers with 4-bit integer weights and 16-bit inputs, on Hopper GPUs."""
