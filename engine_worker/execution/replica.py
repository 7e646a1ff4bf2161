"""One rank's part of a model: weights, KV pool, inputs and graphs. A described step in, logits out.

    replica.move_blocks(transfers)
    prepared = replica.prepare(description)     enqueues the inputs
    logits = replica.run(prepared)              enqueues the forward pass, as a graph where one was captured

A worker has one. It is driven by values alone (StepDescription, Transfers), which could come from another process; it
knows nothing of sequences, of the scheduler's batch or of sampling, but that sampled tokens are the next step's input.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.execution.cuda_graphs import GraphInputs, GraphKey, StepGraphs
from engine_worker.execution.input_builder import StepInputs
from engine_worker.execution.kv_cache import KVCache
from engine_worker.execution.step_description import StepDescription
from engine_worker.model.model_input import ModelInput
from engine_worker.model.served_model import LogitsOf, ServedModel
from engine_worker.scheduling.batch import Transfers, TransferTime


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose inputs are on their way to the device."""

    model_input: ModelInput
    graph: GraphKey | None  # None: it runs kernel by kernel


class Replica:
    def __init__(self, model: ServedModel, kv_cache: KVCache, inputs: StepInputs, max_model_len: int) -> None:
        self.model_spec = model.spec
        self.dtype_name = str(model.dtype).removeprefix("torch.")
        self.device_type: str = kv_cache.pool.device.type
        self.max_model_len = max_model_len
        self.kv_cache = kv_cache
        self._model = model
        self._device = model.attach(kv_cache.pool)
        self._inputs = inputs
        self._graphs: StepGraphs | None = None

    def capture_graphs(self, inputs: GraphInputs, keys: list[GraphKey]) -> Iterator[tuple[float, str]]:
        """Steps that fit one of `keys` are graphs from then on. Yields progress 0..1 and what was captured."""
        graphs = StepGraphs(self._model, self._device, inputs, keys, self.max_model_len)
        yield from graphs.capture()
        self._graphs = graphs

    def move_blocks(self, transfers: Transfers) -> None:
        """Begin the moves of a step, before anything else of it."""
        self.kv_cache.apply_transfers(transfers)

    def finished_transfers(self) -> list[TransferTime]:
        return self.kv_cache.finished_transfers()

    def prepare(self, description: StepDescription, *, allow_graph: bool = True) -> PreparedStep:
        """`allow_graph`: a graph has the logits that are described and no others."""
        graph = self._graphs.key_for(description) if self._graphs is not None and allow_graph else None
        return PreparedStep(self._inputs.unpack(description, graph.size if graph else None), graph)

    @torch.inference_mode()
    def run(self, prepared: PreparedStep, look: Callable[[LogitsOf], None] | None = None) -> Tensor:
        """Logits [N, vocab_size] float32; those of a graph are overwritten by the next one. `look`: see ServedModel."""
        if self._graphs is not None and prepared.graph is not None:
            return self._graphs.replay(prepared.graph)[: len(prepared.model_input.logits_indices)]
        return self._model.forward(prepared.model_input, self._device, look)

    def keep_samples(self, token_ids: Tensor) -> None:
        """`token_ids` (int64, on the device): what was sampled of the step that was prepared last."""
        self._inputs.keep_samples(token_ids)
