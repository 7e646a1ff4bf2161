"""Run a draft head after each step: store its keys and values, and draft the next tokens of sequences.

    steps.launch(step, tokens, description, num_drafts)     enqueues the passes
    drafts = pending.collect()                              waits for the token ids

The first pass computes all rows of the target's step, so the KV cache of the head has no holes, whoever computed a
prefix. Each further pass computes one row per sequence. Decode steps of few rows run as a CUDA graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_worker.execution.step.cuda_graphs import GraphInputs, GraphKey
from engine_worker.execution.step.describe import Lookahead
from engine_worker.execution.step.draft_description import DraftDescription
from engine_worker.model.devices import Device
from engine_worker.model.draft_head.network import DraftedNetwork
from engine_worker.model.model_input import ModelInput
from kernels.draft_inputs import begin_drafts, place_drafts
from kernels.draft_inputs_reference import DraftPlaces, SampledStep

MAX_GRAPH_ROWS = 128  # larger steps take longer than the launches of the head's passes


class PendingDrafts:
    """Drafts that may not be computed yet. On CUDA their copy to the host is enqueued."""

    def __init__(self, token_ids: Tensor, drafting: Sequence[int]) -> None:
        """Copy `token_ids` [num_drafts, Q] to the host."""
        self._drafting = drafting
        self._token_ids = token_ids.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if token_ids.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def collect(self, num_sequences: int) -> list[list[int]]:
        """Return the drafts of each sequence of the batch, empty if none were made for it."""
        if self._copied is not None:
            self._copied.synchronize()
        drafts: list[list[int]] = [[] for _ in range(num_sequences)]
        for place, token_ids in zip(self._drafting, self._token_ids.t().tolist(), strict=True):
            drafts[place] = token_ids
        return drafts


class _Buffers:
    """Tensors of the passes, at fixed addresses because CUDA graphs read them."""

    def __init__(self, max_rows: int, max_tokens: int, num_tables: tuple[int, int], device: torch.device) -> None:
        """Allocate. `num_tables`: groups, and blocks of a table."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_groups, num_blocks = num_tables
        self.described = zeros(4, max_rows, dtype=torch.int32)  # as the fields of DraftDescription
        self.sampled = zeros(max_rows)
        self.next_token_ids = zeros(max_tokens)
        self._places = DraftPlaces(
            kept_rows=zeros(max_rows),
            kept_positions=zeros(max_rows, dtype=torch.int32),
            positions=zeros(max_rows),
            seq_lens=zeros(max_rows, dtype=torch.int32),
            slot_mapping=zeros(num_groups, max_rows),
            block_tables=zeros(num_groups, max_rows, num_blocks, dtype=torch.int32),
        )
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def write(self, description: DraftDescription, sampled: Tensor) -> None:
        """Enqueue copies of a step's arrays, padded to the end of the buffers, and of its samples."""
        rows = np.zeros(self.described.shape, dtype=np.int32)
        rows[2] = -1
        for row, values in zip(
            rows,
            (description.following, description.first_samples, description.last_samples, description.table_rows),
            strict=True,
        ):
            row[: len(values)] = values
        host = torch.from_numpy(rows)
        self.described.copy_(host.pin_memory() if self.described.is_cuda else host, non_blocking=True)
        self.sampled[: len(sampled)] = sampled

    def step(self, model_input: ModelInput, num_sequences: int) -> SampledStep:
        """Return the step with views of this memory."""
        following, firsts, lasts, _ = self.described
        return SampledStep(
            token_ids=model_input.token_ids,
            positions=model_input.positions,
            query_start_loc=model_input.query_start_loc,
            logits_indices=model_input.logits_indices,
            sampled=self.sampled,
            following=following[: len(model_input.seq_lens)],
            first_samples=firsts[:num_sequences],
            last_samples=lasts[:num_sequences],
        )

    def places(self, num_sequences: int, width: int) -> DraftPlaces:
        """Return views for so many sequences, and blocks of a table."""
        whole = self._places
        return DraftPlaces(
            kept_rows=whole.kept_rows[:num_sequences],
            kept_positions=whole.kept_positions[:num_sequences],
            positions=whole.positions[:num_sequences],
            seq_lens=whole.seq_lens[:num_sequences],
            slot_mapping=whole.slot_mapping[:, :num_sequences],
            block_tables=whole.block_tables[:, :num_sequences, :width],
        )

    def pass_input(self, places: DraftPlaces, max_seq_len: int) -> ModelInput:
        """Return the input of a pass of one row for each sequence; the head gets its tokens apart from it."""
        num_sequences = len(places.kept_rows)
        return ModelInput(
            token_ids=places.kept_rows,
            positions=places.positions,
            slot_mapping=places.slot_mapping,
            query_start_loc=self._starts[: num_sequences + 1],
            seq_lens=places.seq_lens,
            block_tables=places.block_tables,
            logits_indices=places.kept_rows,
            max_query_len=1,
            max_seq_len=max_seq_len,
        )


@dataclass(frozen=True, slots=True)
class DraftBounds:
    num_drafts: int  # for each sequence
    max_rows: int  # sequences and samples of a step, padding included
    max_tokens: int  # of a step
    max_model_len: int
    block_size: int
    num_groups: int


class DraftSteps:
    def __init__(self, model: DraftedNetwork, device: Device, bounds: DraftBounds, place: torch.device) -> None:
        """Allocate the buffers on `place`. `device`: the one that the target's steps use."""
        self._model, self._head, self._device, self._bounds = model, model.head, device, bounds
        num_tables = bounds.num_groups, -(-bounds.max_model_len // bounds.block_size)
        self._buffers = _Buffers(bounds.max_rows, bounds.max_tokens, num_tables, place)
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.lookahead = Lookahead(bounds.num_drafts - 1, bounds.max_model_len)

    @torch.inference_mode()
    def launch(
        self, model_input: ModelInput, key: GraphKey | None, sampled: Tensor, description: DraftDescription, number: int
    ) -> PendingDrafts | None:
        """Enqueue the passes after a step, whose inputs must still be there.

        Args:
            model_input: Of the step.
            key: The graph that the step ran as, or None.
            sampled: [N] int64, on the device.
            description: The step.
            number: Drafts for each sequence; 0: only keys and values are stored.

        Returns:
            The drafts, or None if there are none.
        """
        self._buffers.write(description, sampled)
        num_sequences = len(description.drafting)
        if not number or not num_sequences:
            self._store(model_input)
            return None
        if key in self._graphs:
            graph, token_ids = self._graphs[key]
            graph.replay()
            return PendingDrafts(token_ids[:number, :num_sequences], description.drafting)
        token_ids = self._draft(model_input, num_sequences, number, description.max_seq_len)
        return PendingDrafts(token_ids, description.drafting)

    @torch.inference_mode()
    def capture_graphs(self, inputs: GraphInputs, keys: Sequence[GraphKey]) -> Iterator[tuple[float, str]]:
        """Capture the drafts of small decode steps.

        Yields:
            Progress from 0 to 1, and a description of the captured graph.
        """
        keys = [key for key in keys if not key.mixed and key.size <= MAX_GRAPH_ROWS]
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for number, key in enumerate(reversed(keys), start=1):
            self._capture(inputs, key, pool, stream)
            yield number / len(keys), f"graph of {key.size} drafting rows"

    def _capture(self, inputs: GraphInputs, key: GraphKey, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        size, max_len = key.size, self._bounds.max_model_len
        model_input = inputs.views(
            num_rows=size, num_tokens=size, num_logits=size, max_query_len=1, max_seq_len=max_len
        )
        inputs.fill_with_padding(size)
        self._buffers.described.zero_()
        self._buffers.described[2] = -1
        self._draft(model_input, size, self._bounds.num_drafts, max_len)  # compiles and loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            token_ids = self._draft(model_input, size, self._bounds.num_drafts, max_len)
            graph.capture_end()
        graph.replay()  # uploads the graph
        self._graphs[key] = graph, token_ids

    def _store(self, model_input: ModelInput) -> None:
        buffers = self._buffers
        num_tokens = len(model_input.token_ids)
        next_token_ids = buffers.next_token_ids[:num_tokens]
        begin_drafts(buffers.step(model_input, 0), next_token_ids, buffers.places(0, 0))
        hidden = self._head.combine(self._model.taps(num_tokens))
        self._head.store(self._device.begin_step(model_input), next_token_ids, hidden)

    def _draft(self, model_input: ModelInput, num_sequences: int, number: int, max_seq_len: int) -> Tensor:
        """Return the drafts [number, Q] of the first sequences."""
        buffers, bounds = self._buffers, self._bounds
        num_tokens = len(model_input.token_ids)
        next_token_ids = buffers.next_token_ids[:num_tokens]
        places = buffers.places(num_sequences, model_input.block_tables.shape[2])
        begin_drafts(buffers.step(model_input, num_sequences), next_token_ids, places)
        hidden = self._head.combine(self._model.taps(num_tokens))
        first = self._device.begin_step(model_input)
        token_ids, hidden = self._head(first, next_token_ids, hidden, places.kept_rows)
        drafts = [token_ids]
        if number > 1:
            places.block_tables.copy_(model_input.block_tables[:, buffers.described[3, :num_sequences].long()])
        for further in range(1, number):
            place_drafts(places, further, bounds.max_model_len, bounds.block_size)
            step = self._device.begin_step(buffers.pass_input(places, max_seq_len))
            token_ids, hidden = self._head(step, token_ids, hidden)
            drafts.append(token_ids)
        return torch.stack(drafts)
