"""Load a model and measure what it needs: memory, number formats, times of a start."""
