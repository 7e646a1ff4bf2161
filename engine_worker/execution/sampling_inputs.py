"""The parameters of a step's sampling, as tensors on the device; built without waiting for it.

Of a sequence it reads the parameters and how many tokens are out, not which: so a step can be prepared while the one
before still samples. Penalties need the tokens (Sequence.needs_last_token_on_host), and so do grammars and bad words,
which wait for them while the forward pass runs (grammar_masks.py, token_rules.py).

It is used in a step, beside the forward pass: the sampler reads them. It knows no logits and no store.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_worker.execution.sampled_sequence import SampledSequence
from engine_worker.execution.token_counts import PenaltyCounts, TokenCounts
from kernels.sampling.sample_tokens import SamplingRows
from shared.messages import SamplingParams

# Below this a temperature divides fp32 logits to infinity; far above it the draw already is the argmax.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class ScoreEdits:
    """The edits that can change even a greedy choice, few entries of few rows each. Indices are row * V + token id."""

    masked: Tensor  # [M] int64
    biased: Tensor  # [B] int64
    biases: Tensor  # [B] float32
    penalised: Tensor  # [P] int64
    penalties: Tensor  # [3, P] float32: repetition, frequency * count, presence where count > 0

    def applied_to(self, logits: Tensor) -> Tensor:
        """A float32 copy of `logits` [N, V] with, in vLLM's order: min_tokens mask, logit bias, penalties."""
        scores = logits.to(torch.float32, copy=True)
        flat = scores.view(-1)
        flat.index_fill_(0, self.masked, -math.inf)
        flat.index_add_(0, self.biased, self.biases)
        repetition, frequency, presence = self.penalties
        values = flat[self.penalised]
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat.index_copy_(0, self.penalised, values - frequency - presence)
        return scores


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The rows that report log-probabilities."""

    rows: Tensor  # [P] int64
    num_top: list[int]  # [P], how many of the likeliest tokens each reports beside the chosen one
    named: list[tuple[int, ...]]  # [P], the tokens that each reports instead, if any
    named_token_ids: Tensor | None  # [P, the longest of `named`] int64, filled up with 0; None: nobody names any


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that some rows allow, as kernels.token_bitmask takes them."""

    rows: Tensor  # [R] int32
    masks: Tensor  # [R, ceil(V / 32)] int32


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    sequences: Sequence[SampledSequence]
    rows: SamplingRows | None  # None: every row is an argmax
    edits: ScoreEdits | None
    logprobs: LogprobRows | None
    refusals: dict[str, str]  # request id -> why it cannot be sampled
    masks: tuple[TokenMasks, ...] = ()  # a token must be allowed by all


@dataclass(frozen=True, slots=True)
class BatchParameters:
    """The parameters that stay while the same sequences decode, step after step; on the device already."""

    sequences: Sequence[SampledSequence]
    rows: SamplingRows | None  # its indices are those of another step
    logprobs: LogprobRows | None
    may_edit: bool
    has_grammars: bool

    def rows_at(self, output_indices: list[int], device: torch.device) -> SamplingRows | None:
        if self.rows is None:
            return None
        return replace(self.rows, indices=to_device(np.array(output_indices, dtype=np.int64), device))


def batch_parameters(sequences: Sequence[SampledSequence], device: torch.device) -> BatchParameters:
    samplings = [sequence.sampling for sequence in sequences]
    return BatchParameters(
        sequences=list(sequences),
        rows=_sampling_rows(samplings, device),
        logprobs=_logprob_rows(samplings, device),
        may_edit=any(s.min_tokens > 0 or s.logit_bias or s.has_penalties or s.bad_words for s in samplings),
        has_grammars=any(s.grammar is not None for s in samplings),
    )


def _sampling_rows(samplings: list[SamplingParams], device: torch.device) -> SamplingRows | None:
    """None when all are greedy: then nothing is sent to the device at all."""
    random = [row for row, sampling in enumerate(samplings) if not sampling.is_greedy]
    if not random:
        return None
    truncated = [
        row for row in random if samplings[row].top_k > 0 or samplings[row].top_p < 1.0 or samplings[row].min_p > 0.0
    ]
    num_rows = len(samplings)
    # One copy for all: each costs the host about as much as a kernel launch.
    packed = np.empty(5 * num_rows + len(random) + len(truncated), dtype=np.int64)
    integers = packed[: 5 * num_rows].reshape(5, num_rows)
    numbers = integers.view(np.float64)
    integers[0] = [_signed(sampling.seed) for sampling in samplings]
    integers[1] = [sampling.top_k for sampling in samplings]
    numbers[2] = [sampling.top_p for sampling in samplings]
    numbers[3] = [0.0 if s.is_greedy else max(s.temperature, _MIN_TEMPERATURE) for s in samplings]
    numbers[4] = [math.log(s.min_p) if s.min_p > 0.0 else -math.inf for s in samplings]
    packed[5 * num_rows :] = random + truncated
    sent = to_device(packed, device)
    fields = sent[: 5 * num_rows].view(5, num_rows)
    return SamplingRows(
        seeds=fields[0],
        indices=fields[0],
        temperature=fields[3].view(torch.float64),
        log_min_p=fields[4].view(torch.float64),
        top_k=fields[1],
        top_p=fields[2].view(torch.float64),
        random_rows=sent[5 * num_rows : 5 * num_rows + len(random)],
        truncated_rows=sent[5 * num_rows + len(random) :],
    )


def score_edits(
    sequences: Sequence[SampledSequence],
    masked: list[list[int]],
    penalty_counts: PenaltyCounts,
    vocab_size: int,
    device: torch.device,
) -> tuple[ScoreEdits | None, dict[str, str]]:
    """The edits, or None when no sequence has any; and why a sequence cannot be sampled. `masked`: of each row."""
    refusals = {}
    for sequence in sequences:
        outside = [token_id for token_id in sequence.sampling.logit_bias if not 0 <= token_id < vocab_size]
        if outside:
            known = f"the vocabulary has {vocab_size}"
            refusals[sequence.request_id] = f"logit_bias names token {outside[0]}; {known}"
    biases = [{} if sequence.request_id in refusals else sequence.sampling.logit_bias for sequence in sequences]
    counts = [penalty_counts.of(sequence) for sequence in sequences]
    penalised: list[Any] = [[] if counted is None else counted.token_ids for counted in counts]
    if not (any(masked) or any(biases) or any(counts)):
        return None, refusals
    edits = ScoreEdits(
        masked=to_device(_flat_indices(masked, vocab_size), device),
        biased=to_device(_flat_indices([list(bias) for bias in biases], vocab_size), device),
        biases=to_device(np.array(_values(biases), dtype=np.float32), device),
        penalised=to_device(_flat_indices(penalised, vocab_size), device),
        penalties=to_device(_penalties(sequences, counts), device),
    )
    return edits, refusals


def _logprob_rows(samplings: list[SamplingParams], device: torch.device) -> LogprobRows | None:
    asking = [
        (row, sampling.logprobs, sampling.logprob_token_ids)
        for row, sampling in enumerate(samplings)
        if sampling.logprobs is not None
    ]
    if not asking:
        return None
    rows, num_top, named = zip(*asking, strict=True)
    most = max(map(len, named))
    filled = np.array([(*ids, *(0,) * (most - len(ids))) for ids in named], dtype=np.int64) if most else None
    return LogprobRows(
        rows=to_device(np.array(rows, dtype=np.int64), device),
        num_top=list(num_top),
        named=list(named),
        named_token_ids=None if filled is None else to_device(filled, device),
    )


def to_device(values: "np.ndarray[Any, Any]", device: torch.device) -> Tensor:
    """Never waits: a copy from memory that is not pinned would."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _signed(seed: int) -> int:
    """A seed counts modulo 2^64."""
    return (seed + 2**63) % 2**64 - 2**63


def premature_ends(
    sequence: SampledSequence, output_index: int, eos_token_ids: Iterable[int], vocab_size: int
) -> list[int]:
    """The tokens that would end `sequence` before its min_tokens."""
    sampling = sequence.sampling
    if output_index >= sampling.min_tokens:
        return []
    ending = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_token_ids)
    return [token_id for token_id in ending if 0 <= token_id < vocab_size]


def _penalties(sequences: Sequence[SampledSequence], counts: list[TokenCounts | None]) -> "np.ndarray[Any, Any]":
    columns = [np.empty((3, 0), dtype=np.float32)]
    for sequence, counted in zip(sequences, counts, strict=True):
        if counted is not None:
            sampling, count = sequence.sampling, counted.counts
            repetition = np.full_like(count, sampling.repetition_penalty)
            frequency, presence = sampling.frequency_penalty * count, sampling.presence_penalty * (count > 0)
            columns.append(np.stack((repetition, frequency, presence), dtype=np.float32, casting="same_kind"))
    return np.concatenate(columns, axis=1)


def _flat_indices(columns_of_rows: list[Any], vocab_size: int) -> "np.ndarray[Any, Any]":
    """Ragged token ids, a collection for each row, as row * V + token id."""
    lengths = [len(columns) for columns in columns_of_rows]
    rows = np.repeat(np.arange(len(columns_of_rows), dtype=np.int64), lengths)
    columns = [np.asarray(columns, dtype=np.int64) for columns in columns_of_rows]
    return rows * vocab_size + np.concatenate(columns)


def _values(mappings: Iterable[Mapping[int, float]]) -> list[float]:
    return list(chain.from_iterable(mapping.values() for mapping in mappings))
