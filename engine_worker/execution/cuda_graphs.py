"""Decode steps as CUDA graphs: one launch for the whole forward pass, captured for a few batch sizes.

A batch is padded to the next size that was captured. Every graph reads the persistent inputs and writes its logits into
the same buffer, which the next replay overwrites. All graphs share one memory pool: only one runs at a time. They are
captured largest first, so that the smaller ones fit into memory that the pool has.

What a graph launches is fixed at capture: kernels take lengths from the device, and grids are those of the longest
sequence there may be. Knows nothing of sampling.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.model.model_input import ModelInput
from engine_worker.model.transformer import Device, Transformer

# Larger batches run for longer than their launches take.
MAX_GRAPH_ROWS = 512


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: at most 8 rows of padding up to 256, 16 above; `max_num_seqs` is the last."""
    largest = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, MAX_GRAPH_ROWS + 1, 16)]
    return [*(size for size in sizes if size < largest), largest]


class GraphInputs(Protocol):
    """PersistentInputs."""

    def views(
        self, *, num_rows: int, num_tokens: int, num_logits: int, max_query_len: int, max_seq_len: int
    ) -> ModelInput: ...
    def fill_with_padding(self, num_rows: int) -> None: ...


class DecodeGraphs:
    def __init__(
        self, model: Transformer, device: Device, inputs: GraphInputs, sizes: list[int], max_seq_len: int
    ) -> None:
        self._model = model
        self._device = device
        self._inputs = inputs
        self._sizes = sizes
        self._max_seq_len = max_seq_len
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None  # [largest size, V]

    def size_for(self, num_sequences: int) -> int | None:
        """Rows of the graph that serves `num_sequences`; None if there is none."""
        if num_sequences > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, num_sequences)]

    @torch.inference_mode()
    def capture(self) -> Iterator[tuple[float, str]]:
        """Yields progress 0..1 and what was captured."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for number, size in enumerate(reversed(self._sizes), start=1):
            self._capture(size, pool, stream)
            yield number / len(self._sizes), f"graph of {size} sequences"

    def replay(self, size: int) -> Tensor:
        """Logits [size, V]; overwritten by the next replay."""
        assert self._logits is not None
        self._graphs[size].replay()
        return self._logits[:size]

    def _capture(self, size: int, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        model_input = self._inputs.views(
            num_rows=size, num_tokens=size, num_logits=size, max_query_len=1, max_seq_len=self._max_seq_len
        )
        self._inputs.fill_with_padding(size)
        logits = self._model.forward(model_input, self._device)  # compiles and loads what the capture must find ready
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        del logits
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # "thread_local": another thread's calls (a metrics endpoint asking for memory) do not break the capture.
            graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            self._logits[:size].copy_(self._model.forward(model_input, self._device))
            graph.capture_end()
        self._graphs[size] = graph
