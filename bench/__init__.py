"""Load generator, engine and kernel benchmarks."""
