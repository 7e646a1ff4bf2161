"""Vectors of the prompts that a step completes, for the requests that ask for one.

A vector is the last token's hidden state after the final norm, cut to the requested dimensions and scaled to length 1.
The sampled token of such a sequence is not shown.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.sampling.sampling_pieces import to_device
from engine_worker.model.served_model import StepOutput
from engine_worker.scheduling.batch import ScheduledSequence
from shared.messages import EncodedLogprobs, encoded_vector


class PooledVectors:
    """The vectors of one step: launched in its forward pass, collected after it."""

    def __init__(self, rows: list[ScheduledSequence], device: torch.device) -> None:
        """Prepare the step with `rows` in the order of the model's input."""
        pooled = dict(_pooled(rows))
        self.rows, self._sequences = list(pooled), list(pooled.values())
        self._device = device
        self._on_host: Tensor | None = None

    def launch(self, output: StepOutput) -> None:
        """Enqueue the computation and the copy to the host."""
        hidden = output.hidden(to_device(np.array(self.rows), self._device))
        self._on_host = hidden.float().to("cpu", non_blocking=True)

    def collect(self) -> dict[SampledSequence, EncodedLogprobs]:
        """Return the vectors. Call after the device has completed the step."""
        assert self._on_host is not None, "launch() first"
        hidden = zip(self._sequences, self._on_host.numpy(), strict=True)
        return {sequence: encoded_vector(_vector(sequence, values).tobytes()) for sequence, values in hidden}


def _pooled(rows: list[ScheduledSequence]) -> Iterator[tuple[int, SampledSequence]]:
    """Yield the last row of each sequence that needs its vector."""
    end = 0
    for scheduled in rows:
        end += scheduled.num_new_tokens
        if scheduled.samples and scheduled.sequence.pooling is not None:
            yield end - 1, scheduled.sequence


def _vector(sequence: SampledSequence, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    assert sequence.pooling is not None
    values = hidden[: sequence.pooling.dimensions or None]
    return (values / max(float(np.linalg.norm(values)), 1e-12)).astype("<f4")
