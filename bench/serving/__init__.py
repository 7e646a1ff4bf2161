"""Benchmarks over HTTP with real processes: ours, and other servers."""
