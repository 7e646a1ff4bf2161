"""The figures of the PagedAttention paper (arXiv 2309.06180), reproduced with this engine: `python -m bench.paper`."""
