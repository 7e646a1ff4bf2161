"""Run one step on one rank: inputs, KV pool, CUDA graphs, model."""
