"""What drafts that the device makes have in common, whether a head computes them or a search finds them.

    drafts = maker.launch(...)                          enqueues the work after a step was sampled
    PendingDrafts(drafts, sequences).by_sequence        waits for the token ids

What a maker leaves in LastDrafts lets the next step begin before the host knows the drafts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine_worker.execution.step.cuda_graphs import GraphKey
from engine_worker.execution.step.describe import Lookahead
from engine_worker.execution.step.draft_description import DraftDescription
from engine_worker.execution.step.step_description import Int32Array
from engine_worker.model.model_input import ModelInput
from engine_worker.scheduling.batch import Sequence
from kernels.draft_inputs_reference import LastDrafts, SampledStep


@dataclass(frozen=True, slots=True)
class DraftBounds:
    num_drafts: int  # for each sequence
    max_rows: int  # sequences and samples of a step, padding included
    max_tokens: int  # of a step
    max_model_len: int
    block_size: int
    num_groups: int
    lookahead: int  # see LastDrafts


class PendingDrafts:
    """Drafts that may not be computed yet. On CUDA their copy to the host is enqueued."""

    def __init__(self, token_ids: Tensor, drafting: list[Sequence]) -> None:
        """Copy `token_ids` [num_drafts, Q], the drafts of the sequences `drafting`, to the host."""
        self._drafting = drafting
        self._token_ids = token_ids.to("cpu", non_blocking=True) if token_ids.is_cuda else token_ids.clone()
        self._copied = torch.cuda.Event() if token_ids.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    @cached_property
    def by_sequence(self) -> Mapping[Sequence, list[int]]:
        """Wait for the device, and return the drafts of each sequence."""
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._drafting, self._token_ids.t().tolist(), strict=True))


def last_drafts(bounds: DraftBounds, device: torch.device) -> LastDrafts:
    """Allocate what a maker leaves for the next step."""
    rows = bounds.max_rows
    return LastDrafts(
        next_token_ids=torch.zeros(bounds.max_tokens, dtype=torch.int64, device=device),
        kept_rows=torch.zeros(rows, dtype=torch.int64, device=device),
        kept_positions=torch.zeros(rows, dtype=torch.int32, device=device),
        drafts=torch.zeros(bounds.num_drafts, rows, dtype=torch.int64, device=device),
        lookahead=bounds.lookahead,
    )


class DraftMaker(Protocol):
    """Makes drafts after each step."""

    lookahead: Lookahead
    follows_all_steps: bool  # it must also know the steps that neither check nor make drafts

    def launch(
        self, model_input: ModelInput, key: GraphKey | None, sampled: Tensor, description: DraftDescription, number: int
    ) -> Tensor | None:
        """Enqueue the work after a step, whose inputs must still be there.

        Args:
            model_input: Of the step.
            key: The graph that the step ran as, or None.
            sampled: [N] int64, on the device.
            description: The step.
            number: Drafts for each sequence; 0: the step is only noted.

        Returns:
            The drafts [number, Q] on the device, or None if there are none. The next call overwrites them.
        """


class SampledSteps:
    """The step that was sampled last, at fixed addresses because CUDA graphs read it."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        """`max_rows`: sequences and samples of a step, padding included."""
        self.described = torch.zeros(4, max_rows, dtype=torch.int32, device=device)
        self._sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def write(self, description: DraftDescription, places: Int32Array, sampled: Tensor) -> None:
        """Enqueue copies of a step's arrays, padded to the end of the buffers, and of its samples.

        `places`: [Q], where the maker finds each sequence; the last of the described rows.
        """
        rows = np.zeros(self.described.shape, dtype=np.int32)
        rows[2] = -1
        values = description.following, description.first_samples, description.last_samples, places
        for row, written in zip(rows, values, strict=True):
            row[: len(written)] = written
        host = torch.from_numpy(rows)
        self.described.copy_(host.pin_memory() if self.described.is_cuda else host, non_blocking=True)
        self._sampled[: len(sampled)] = sampled

    def clear(self) -> None:
        """Enqueue a step without sequences, on which a graph is captured."""
        self.described.zero_()
        self.described[2] = -1

    def step(self, model_input: ModelInput, num_sequences: int) -> SampledStep:
        """Return the step with views of this memory."""
        following, firsts, lasts, _ = self.described
        return SampledStep(
            token_ids=model_input.token_ids,
            positions=model_input.positions,
            query_start_loc=model_input.query_start_loc,
            logits_indices=model_input.logits_indices,
            sampled=self._sampled,
            following=following[: len(model_input.seq_lens)],
            first_samples=firsts[:num_sequences],
            last_samples=lasts[:num_sequences],
        )
