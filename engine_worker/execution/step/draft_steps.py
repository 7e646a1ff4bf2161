"""Run a draft head after each step: store its keys and values, and draft the next tokens of sequences.

The first pass computes all rows of the target's step, so the KV cache of the head has no holes, whoever computed a
prefix. Each further pass computes one row per sequence. Decode steps of few rows run as a CUDA graph.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engine_worker.execution.step.cuda_graphs import GraphInputs, GraphKey
from engine_worker.execution.step.describe import Lookahead
from engine_worker.execution.step.draft_description import DraftDescription
from engine_worker.execution.step.draft_maker import DraftBounds, SampledSteps
from engine_worker.model.devices import Device
from engine_worker.model.draft_head.network import DraftedNetwork
from engine_worker.model.model_input import ModelInput
from kernels.draft_inputs import begin_drafts, place_drafts
from kernels.draft_inputs_reference import DraftPlaces, LastDrafts

MAX_GRAPH_ROWS = 128  # larger steps take longer than the launches of the head's passes


class _Buffers:
    """Tensors of the passes, at fixed addresses because CUDA graphs read them."""

    def __init__(self, bounds: DraftBounds, last: LastDrafts) -> None:
        """Allocate what the next step does not read; `last` is what it reads."""
        device, max_rows = last.drafts.device, bounds.max_rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_blocks = -(-bounds.max_model_len // bounds.block_size)
        self.sampled = SampledSteps(max_rows, device)
        self.last = last
        self._places = DraftPlaces(
            kept_rows=last.kept_rows,
            kept_positions=last.kept_positions,
            positions=zeros(max_rows),
            seq_lens=zeros(max_rows, dtype=torch.int32),
            slot_mapping=zeros(bounds.num_groups, max_rows),
            block_tables=zeros(bounds.num_groups, max_rows, num_blocks, dtype=torch.int32),
        )
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

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


class DraftSteps:
    """The passes of one head. Implements DraftMaker."""

    follows_all_steps = True  # the next pass reads keys and values of all tokens

    def __init__(self, model: DraftedNetwork, device: Device, bounds: DraftBounds, last: LastDrafts) -> None:
        """Allocate the buffers. `device`: the one that the target's steps use. `last`: what their inputs read."""
        self._model, self._head, self._device, self._bounds = model, model.head, device, bounds
        self._buffers = _Buffers(bounds, last)
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self.lookahead = Lookahead(last.lookahead, bounds.max_model_len)

    @torch.inference_mode()
    def launch(
        self, model_input: ModelInput, key: GraphKey | None, sampled: Tensor, description: DraftDescription, number: int
    ) -> Tensor | None:
        """Enqueue the passes after a step; without drafts only keys and values are stored. See DraftMaker."""
        self._buffers.sampled.write(description, description.table_rows, sampled)
        num_sequences = description.num_drafting
        if not number or not num_sequences:
            self._store(model_input, num_sequences)
            return None
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            self._draft(model_input, num_sequences, number, description.max_seq_len)
        return self._buffers.last.drafts[:number, :num_sequences]

    @torch.inference_mode()
    def capture_graphs(self, inputs: GraphInputs, keys: Iterable[GraphKey]) -> Iterator[tuple[float, str]]:
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
        self._buffers.sampled.clear()
        self._draft(model_input, size, self._bounds.num_drafts, max_len)  # compiles and loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            self._draft(model_input, size, self._bounds.num_drafts, max_len)
            graph.capture_end()
        graph.replay()  # uploads the graph
        self._graphs[key] = graph

    def _store(self, model_input: ModelInput, num_sequences: int) -> None:
        """Store the keys and values of a step, and note what stands of its first sequences."""
        next_token_ids = self._begin(model_input, num_sequences)
        hidden = self._head.combine(self._model.taps(len(next_token_ids)))
        self._head.store(self._device.begin_step(model_input), next_token_ids, hidden)

    def _draft(self, model_input: ModelInput, num_sequences: int, number: int, max_seq_len: int) -> None:
        """Write `number` drafts of each of the first sequences."""
        buffers, bounds = self._buffers, self._bounds
        drafts = buffers.last.drafts[:, :num_sequences]
        places = buffers.places(num_sequences, model_input.block_tables.shape[2])
        next_token_ids = self._begin(model_input, num_sequences)
        hidden = self._head.combine(self._model.taps(len(next_token_ids)))
        step = self._device.begin_step(model_input)
        token_ids, hidden = self._head(step, next_token_ids, hidden, places.kept_rows)
        drafts[0] = token_ids
        if number > 1:
            places.block_tables.copy_(model_input.block_tables[:, buffers.sampled.described[3, :num_sequences].long()])
        for further in range(1, number):
            place_drafts(places, further, bounds.max_model_len, bounds.block_size)
            step = self._device.begin_step(buffers.pass_input(places, max_seq_len))
            token_ids, hidden = self._head(step, token_ids, hidden)
            drafts[further] = token_ids

    def _begin(self, model_input: ModelInput, num_sequences: int) -> Tensor:
        """Return the token after each of the step's tokens, and write what stands."""
        last = self._buffers.last
        begin_drafts(self._buffers.sampled.step(model_input, num_sequences), last)
        return last.next_token_ids[: len(model_input.token_ids)]
