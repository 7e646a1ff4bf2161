"""The figures of the PagedAttention paper (arXiv 2309.06180), redone with this engine; `python -m bench.paper`."""
