"""One rank's part of a model: weights, KV pool, inputs and graphs. A described step in, logits out.

    prepared = replica.prepare(description)     begins the step's block moves, enqueues its inputs
    logits = replica.run(prepared)              enqueues the forward pass, as a graph where one was captured

A rank has one; who drives it drives a group of them alike (StepReplica). It is driven by values alone, which may come
from another process; it knows nothing of sequences, of the scheduler's batch or of sampling, but that sampled tokens
are the next step's input. A block's walk goes through here, where its moves and then its step reach the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.execution.cuda_graphs import GraphInputs, GraphKey, StepGraphs
from engine_worker.execution.input_builder import StepInputs
from engine_worker.execution.kv_cache import KVCache
from engine_worker.execution.step_description import StepDescription
from engine_worker.model.decode_programs import decode_programs
from engine_worker.model.model_input import ModelInput
from engine_worker.model.served_model import LogitsOf, ServedModel
from engine_worker.model.spec import ModelShape
from engine_worker.scheduling.batch import Transfers, TransferTime


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose inputs are on their way to the device."""

    model_input: ModelInput
    graph: GraphKey | None  # None: it runs kernel by kernel


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
        """Begin block moves that no step comes with."""

    def finished_transfers(self) -> list[TransferTime]: ...
    def prepare(self, description: StepDescription, looks: Sequence[range] = ()) -> PreparedStep:
        """Begin the moves of a step and enqueue its inputs.

        `looks`: the rows whose logits run()'s `look` will ask for, call by call; with any the step is no graph, which
        has the logits that are described and no others.
        """

    def run(self, prepared: PreparedStep, look: Callable[[LogitsOf], None] | None = None) -> Tensor:
        """Logits [N, vocab_size] float32; those of a graph are overwritten by the next one. `look`: see ServedModel."""

    def keep_samples(self, token_ids: Tensor) -> None:
        """`token_ids` (int64, on the device): what was sampled of the step that was prepared last."""


class Replica:
    def __init__(self, model: ServedModel, kv_cache: KVCache, inputs: StepInputs, max_model_len: int) -> None:
        self.model_spec: ModelShape = model.spec
        self.dtype_name = str(model.dtype).removeprefix("torch.")
        self.device_type: str = kv_cache.pool.device.type
        self.max_model_len = max_model_len
        self.kv_cache = kv_cache
        self._model = model
        self._device = model.attach(kv_cache.pool)
        self._inputs = inputs
        self._graphs: StepGraphs | None = None
        self._programs = decode_programs(model, self._device)

    def capture_graphs(
        self, inputs: GraphInputs, keys: list[GraphKey], *, has_logits: bool = True
    ) -> Iterator[tuple[float, str]]:
        """Steps that fit one of `keys` are graphs from then on. Yields progress 0..1 and what was captured.

        `has_logits`: see StepGraphs.
        """
        graphs = StepGraphs(self._model, self._device, inputs, keys, self.max_model_len, has_logits=has_logits)
        yield from graphs.capture()
        self._graphs = graphs

    def move_blocks(self, transfers: Transfers) -> None:
        self.kv_cache.apply_transfers(transfers)

    def finished_transfers(self) -> list[TransferTime]:
        return self.kv_cache.finished_transfers()

    def prepare(self, description: StepDescription, looks: Sequence[range] = ()) -> PreparedStep:
        return self.begin(description, self.graph_for(description, looks))

    def graph_for(self, description: StepDescription, looks: Sequence[range] = ()) -> GraphKey | None:
        """Choose how a step runs; None: kernel by kernel. Of a group, rank 0 alone chooses."""
        return self._graphs.key_for(description) if self._graphs is not None and not looks else None

    def begin(self, description: StepDescription, graph: GraphKey | None) -> PreparedStep:
        """Prepare a step that runs as it was chosen."""
        self.move_blocks(description.transfers)
        return PreparedStep(self._inputs.unpack(description, graph.size if graph else None), graph)

    @torch.inference_mode()
    def run(self, prepared: PreparedStep, look: Callable[[LogitsOf], None] | None = None) -> Tensor:
        if self._graphs is not None and prepared.graph is not None:
            return self._graphs.replay(prepared.graph)[: len(prepared.model_input.logits_indices)]
        if look is None and self._programs is not None:
            logits = self._programs.logits_of(prepared.model_input)
            if logits is not None:
                return logits
        return self._model.forward(prepared.model_input, self._device, look)

    def keep_samples(self, token_ids: Tensor) -> None:
        self._inputs.keep_samples(token_ids)
