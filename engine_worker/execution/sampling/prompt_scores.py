"""Log-probabilities of prompt tokens, given the tokens before them, for the requests of a step that ask for them.

All logits of a prompt would need too much memory (8,192 x 128,256 floats are 4 GB), so ROWS_AT_ONCE rows are computed
and reduced at a time. A step covers the prompt tokens that it computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine_worker.execution.sampling.logprobs import DeviceLogprobs, launch_logprobs
from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.sampling.sampling_inputs import LogprobRows
from engine_worker.execution.sampling.sampling_pieces import to_device
from engine_worker.model.served_model import StepOutput
from engine_worker.scheduling.batch import PromptScore, ScheduledSequence
from shared.messages import EncodedLogprobs, PromptLogprobs, encoded_logprobs

ROWS_AT_ONCE = 64  # less than the maximum of sampled rows, whose logits are part of the measured peak


@dataclass(frozen=True, slots=True)
class _Part:
    """The prompt tokens of one sequence in one step, and the row of the first token's logits."""

    scheduled: ScheduledSequence
    tokens: range
    first_row: int


class PromptScores:
    """The prompt log-probabilities of one step: launched in its forward pass, collected after it."""

    def __init__(self, rows: list[ScheduledSequence], device: torch.device) -> None:
        """Prepare the step with `rows` in the order of the model's input."""
        self._device = device
        self._parts = list(_parts(rows))
        self._launched: list[DeviceLogprobs] = []

    @property
    def looks(self) -> list[range]:
        """Return the rows of each call of `output.logits` in launch()."""
        return [rows for part in self._parts for _, rows in _pieces(part)]

    def launch(self, output: StepOutput) -> None:
        """Enqueue the computation and the copies to the host."""
        for part in self._parts:
            sequence = part.scheduled.sequence
            num_top = sequence.sampling.prompt_logprobs or 0
            for tokens, rows in _pieces(part):
                self._launched.append(self._launch(output, sequence, tokens, rows, num_top))

    def collect(self) -> list[PromptScore]:
        """Return the results. Call after the device has completed the step."""
        scores = iter(chain.from_iterable(_tokens(launched) for launched in self._launched))
        return [
            (part.scheduled.sequence, PromptLogprobs(part.tokens.start, [next(scores) for _ in part.tokens]))
            for part in self._parts
        ]

    def _launch(
        self, output: StepOutput, sequence: SampledSequence, tokens: range, rows: range, num_top: int
    ) -> DeviceLogprobs:
        logits = output.logits(torch.arange(rows.start, rows.stop, device=self._device))
        targets = to_device(np.array(sequence.prompt_token_ids[tokens.start : tokens.stop]), self._device)
        places = torch.arange(len(tokens), device=self._device)
        asked = LogprobRows(places, [num_top] * len(tokens), [()] * len(tokens), None)
        return launch_logprobs(logits, targets, asked).to_host()


def _parts(rows: list[ScheduledSequence]) -> Iterator[_Part]:
    row = 0
    for scheduled in rows:
        if tokens := scheduled.scored_tokens:
            yield _Part(scheduled, tokens, row + tokens.start - 1 - scheduled.start)
        row += scheduled.num_new_tokens


def _pieces(part: _Part) -> Iterator[tuple[range, range]]:
    """Yield up to ROWS_AT_ONCE prompt tokens, and the rows of their logits."""
    for start in range(0, len(part.tokens), ROWS_AT_ONCE):
        tokens = part.tokens[start : start + ROWS_AT_ONCE]
        yield tokens, range(part.first_row + start, part.first_row + start + len(tokens))


def _tokens(launched: DeviceLogprobs) -> list[EncodedLogprobs]:
    answers = launched.per_row(len(launched.asked.num_top))
    return [encoded_logprobs(answer) for answer in answers if answer is not None]
