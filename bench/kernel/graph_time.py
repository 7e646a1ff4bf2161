"""Time work on a CUDA device without the host's part, by replaying a CUDA graph."""

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_microseconds(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Return the median time of one call in a graph of all calls, whose data together should exceed the L2 cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile outside of the capture
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    milliseconds = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return statistics.median(milliseconds[3:]) * 1e3 / len(calls)
