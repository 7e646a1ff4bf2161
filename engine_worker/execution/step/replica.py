"""One rank's part of a model: weights, KV pool, inputs, and graphs. It turns a described step into logits.

    prepared = replica.prepare(description)     begins the step's block moves, enqueues its inputs
    logits = replica.run(prepared)              enqueues the forward pass, as a graph if one was captured

Inputs are plain values, which may come from another process. A ReplicaGroup has the same interface (StepReplica).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.execution.step.cuda_graphs import GraphInputs, GraphKey, StepGraphs
from engine_worker.execution.step.input_builder import StepInputs
from engine_worker.execution.step.kv_cache import KVCache
from engine_worker.execution.step.step_description import StepDescription
from engine_worker.kv.transfers import Transfers, TransferTime
from engine_worker.model.decode_programs import decode_programs
from engine_worker.model.model_input import ModelInput
from engine_worker.model.served_model import ServedModel, StepOutput
from engine_worker.model.spec import ModelShape


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose inputs are enqueued."""

    model_input: ModelInput
    graph: GraphKey | None  # None: no graph
    num_logits: int  # without padding


class StepReplica(Protocol):
    """A Replica, or the ReplicaGroup of all ranks."""

    @property
    def model_spec(self) -> ModelShape: ...
    @property
    def dtype_name(self) -> str: ...
    @property
    def device_type(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def kv_cache(self) -> KVCache: ...
    def move_blocks(self, transfers: Transfers) -> None:
        """Enqueue block moves without a step."""

    def finished_transfers(self) -> list[TransferTime]: ...
    def prepare(
        self, description: StepDescription, looks: Sequence[range] = (), pooled: Sequence[int] = ()
    ) -> PreparedStep:
        """Enqueue the moves and the inputs of a step.

        `looks` are the rows of each call of `logits` in run()'s `look`, and `pooled` those of the call of `hidden`
        after them. A graph computes only the described logits, so a step with such calls does not run as one.
        """

    def run(self, prepared: PreparedStep, look: Callable[[StepOutput], None] | None = None) -> Tensor:
        """Return logits [N, vocab_size], float32; a graph overwrites those of the last one. `look`: see ServedModel."""

    def keep_samples(self, token_ids: Tensor) -> None:
        """Keep `token_ids` (int64, on the device), the samples of the last prepared step."""


class Replica:
    def __init__(self, model: ServedModel, kv_cache: KVCache, inputs: StepInputs, max_model_len: int) -> None:
        self.model_spec: ModelShape = model.spec
        self.dtype_name = str(model.dtype).removeprefix("torch.")
        self.device_type: str = kv_cache.pool.device.type
        self.max_model_len = max_model_len
        self.kv_cache = kv_cache
        self._model = model
        self.device = model.attach(kv_cache.pool, kv_cache.layout.places, kv_cache.states)
        self._inputs = inputs
        self._graphs: StepGraphs | None = None
        self._programs = decode_programs(model, self.device)

    def capture_graphs(
        self, inputs: GraphInputs, keys: list[GraphKey], *, has_logits: bool = True
    ) -> Iterator[tuple[float, str]]:
        """Capture the graphs `keys`; later steps use them. `has_logits`: see StepGraphs.

        Yields:
            Progress from 0 to 1, and a description of the captured graph.
        """
        graphs = StepGraphs(self._model, self.device, inputs, keys, self.max_model_len, has_logits=has_logits)
        yield from graphs.capture()
        self._graphs = graphs

    def move_blocks(self, transfers: Transfers) -> None:
        self.kv_cache.apply_transfers(transfers)

    def finished_transfers(self) -> list[TransferTime]:
        return self.kv_cache.finished_transfers()

    def prepare(
        self, description: StepDescription, looks: Sequence[range] = (), pooled: Sequence[int] = ()
    ) -> PreparedStep:
        return self.begin(description, self.graph_for(description, has_looks=bool(looks or pooled)))

    def graph_for(self, description: StepDescription, *, has_looks: bool) -> GraphKey | None:
        """Choose the graph of a step, or None. In a group only rank 0 chooses."""
        return self._graphs.key_for(description) if self._graphs is not None and not has_looks else None

    def begin(self, description: StepDescription, graph: GraphKey | None) -> PreparedStep:
        """Prepare a step for the chosen graph."""
        self.move_blocks(description.transfers)
        model_input = self._inputs.unpack(description, graph.size if graph else None)
        return PreparedStep(model_input, graph, description.num_logits)

    @torch.inference_mode()
    def run(self, prepared: PreparedStep, look: Callable[[StepOutput], None] | None = None) -> Tensor:
        if self._graphs is not None and prepared.graph is not None:
            return self._graphs.replay(prepared.graph)[: prepared.num_logits]
        if look is None and self._programs is not None:
            logits = self._programs.logits_of(prepared.model_input)
            if logits is not None:
                return logits
        return self._model.forward(prepared.model_input, self.device, look)[: prepared.num_logits]

    def keep_samples(self, token_ids: Tensor) -> None:
        self._inputs.keep_samples(token_ids)
