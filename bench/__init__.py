"""Load generator, and benchmarks of engine, kernels and serving."""
