"""Benchmarks of single kernels: results against references, times against the device's ceilings."""
