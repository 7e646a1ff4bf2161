"""CUDA graphs of small steps: one launch for a whole forward pass, captured for a few numbers of tokens.

    decode   each row has one token: 1 to 1024 sequences, or drafts of fewer
    mixed    some have more (only in mode "full"): up to 512 tokens, or up to 1024 with more than 256 logits

A batch is padded to the next captured size, in rows and in tokens. All graphs read the persistent inputs, write their
logits into one buffer that the next replay overwrites, and share one memory pool, because only one runs at a time.
The launches of a graph are fixed at capture: kernels read lengths from the device, and grids fit the longest sequence.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.execution.settings import StepBounds
from engine_worker.execution.step.step_description import StepDescription
from engine_worker.model.devices import Device
from engine_worker.model.model_input import ModelInput
from engine_worker.model.served_model import ServedModel

# Larger steps take longer than their launches: 350 launches are 10 to 20 ms of the host while the worker's other thread
# runs Python too, and 1,024 rows of an 8B model in fp8 take a GPU 12 ms.
MAX_GRAPH_TOKENS = 1024
# Limit of a mixed step with few logits: a larger output layer would compute many rows that are not needed.
MAX_MIXED_LOGITS = 256
MAX_FEW_LOGITS_TOKENS = 512


@dataclass(frozen=True, slots=True)
class GraphKey:
    size: int  # rows and tokens
    mixed: bool

    @property
    def num_logits(self) -> int:
        has_few = self.mixed and self.size <= MAX_FEW_LOGITS_TOKENS
        return min(self.size, MAX_MIXED_LOGITS) if has_few else self.size


class GraphInputs(Protocol):
    """The interface of PersistentInputs that a capture needs."""

    def views(
        self, *, num_rows: int, num_tokens: int, num_logits: int, max_query_len: int, max_seq_len: int
    ) -> ModelInput: ...
    def fill_with_padding(self, size: int) -> None: ...


def decode_sizes(max_rows: int) -> list[int]:
    """Return the captured numbers of rows: steps of 8 up to 256, of 16 up to 512, and of 32 above.

    The last one is `max_rows`, at most MAX_GRAPH_TOKENS.
    """
    largest = min(max_rows, MAX_GRAPH_TOKENS)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, MAX_GRAPH_TOKENS + 1, 32)]
    return [*(size for size in sizes if size < largest), largest]


def mixed_sizes(bounds: StepBounds) -> list[int]:
    """Return the captured numbers of tokens, ascending.

    Reading the weights dominates up to 64 tokens; after that 32 more tokens cost about 0.6 ms. Sizes over
    MAX_FEW_LOGITS_TOKENS are used only if there may be many logits.
    """
    max_tokens = MAX_GRAPH_TOKENS if bounds.max_num_seqs > MAX_MIXED_LOGITS else MAX_FEW_LOGITS_TOKENS
    largest = min(bounds.max_num_batched_tokens, max_tokens)
    sizes = [16, *range(32, MAX_FEW_LOGITS_TOKENS + 1, 32), *range(576, MAX_GRAPH_TOKENS + 1, 64)]
    return [*(size for size in sizes if size < largest), largest]


def graph_keys(mode: str, bounds: StepBounds) -> list[GraphKey]:
    """Return the graphs that a worker captures in a mode of settings.CUDAGRAPH_MODES."""
    decodes, mixed = decode_sizes(bounds.max_num_samples), mixed_sizes(bounds)
    keys = [GraphKey(size, mixed=False) for size in decodes] if mode != "none" else []
    return keys + [GraphKey(size, mixed=True) for size in mixed] if mode == "full" else keys


class StepGraphs:
    def __init__(
        self,
        model: ServedModel,
        device: Device,
        inputs: GraphInputs,
        keys: list[GraphKey],
        max_seq_len: int,
        *,
        has_logits: bool = True,
    ) -> None:
        """Prepare the capture of `keys`.

        `has_logits` is False on a rank that sends its part of the logits to rank 0 and needs no buffer for them.
        """
        self._has_logits = has_logits
        self._model = model
        self._device = device
        self._inputs = inputs
        self._keys = sorted(keys, key=lambda key: key.size)
        self._sizes = {mixed: [key.size for key in self._keys if key.mixed == mixed] for mixed in (False, True)}
        self._max_seq_len = max_seq_len
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None  # [max logits, V]; without logits [max logits, 0]

    def key_for(self, description: StepDescription) -> GraphKey | None:
        """Return the graph that can run a step, or None."""
        num_tokens = description.num_tokens
        mixed = description.max_query_len > 1
        if mixed and description.num_logits > MAX_MIXED_LOGITS:
            num_tokens = max(num_tokens, MAX_FEW_LOGITS_TOKENS + 1)
        elif mixed and num_tokens > MAX_FEW_LOGITS_TOKENS:
            return None
        sizes = self._sizes[mixed]
        if not sizes or num_tokens > sizes[-1]:
            return None
        key = GraphKey(sizes[bisect_left(sizes, num_tokens)], mixed)
        return key if description.num_logits <= key.num_logits else None

    @torch.inference_mode()
    def capture(self) -> Iterator[tuple[float, str]]:
        """Capture all graphs, largest first, so that smaller ones reuse the pool's memory.

        Yields:
            Progress from 0 to 1, and a description of the captured graph.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        self._logits = self._logits_buffer()
        for number, key in enumerate(reversed(self._keys), start=1):
            self._capture(key, self._logits[: key.num_logits] if self._has_logits else None, pool, stream)
            yield number / len(self._keys), f"graph of {key.size} {'tokens' if key.mixed else 'sequences'}"

    def replay(self, key: GraphKey) -> Tensor:
        """Run a graph. Returns logits [key.num_logits, V], or empty rows; the next replay overwrites them."""
        assert self._logits is not None
        self._graphs[key].replay()
        return self._logits[: key.num_logits]

    def _capture(self, key: GraphKey, logits: Tensor | None, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        model_input = self._model_input(key)
        self._inputs.fill_with_padding(key.size)
        # Compile and load the kernels, because a capture cannot.
        self._model.forward(model_input, self._device, logits=logits)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # "thread_local": another thread's calls (a metrics endpoint asking for memory) do not break the capture.
            graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            self._model.forward(model_input, self._device, logits=logits)
            graph.capture_end()
        graph.replay()  # uploads the graph; otherwise the first step of its size would wait
        self._graphs[key] = graph

    def _model_input(self, key: GraphKey) -> ModelInput:
        return self._inputs.views(
            num_rows=key.size,
            num_tokens=key.size,
            num_logits=key.num_logits,
            max_query_len=key.size if key.mixed else 1,
            max_seq_len=self._max_seq_len,
        )

    def _logits_buffer(self) -> Tensor:
        key = max(self._keys, key=lambda key: key.num_logits)
        device = self._model_input(key).token_ids.device
        vocab_size = self._model.spec.vocab_size if self._has_logits else 0
        return torch.empty(key.num_logits, vocab_size, dtype=torch.float32, device=device)
