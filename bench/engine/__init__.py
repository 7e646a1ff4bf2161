"""Benchmarks of the engine in this process, without HTTP: speed, parts of a step, and exactness."""
