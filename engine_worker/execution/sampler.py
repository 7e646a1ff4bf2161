"""Logits of one step -> one token for each sequence.

    sample(logits [N, V], sequences) -> (token ids, failures)

Order of the operations (that of vLLM, so that the same parameters mean the same here):
    min_tokens mask, logit bias, repetition + frequency + presence penalties
    then argmax (greedy), or temperature, min-p, top-k, top-p and a draw

A draw depends on the distribution and on (seed, output index) alone: not on the batch, the slot, earlier draws or the
device. So preemption, resume and replay need no random state, and penalties are recounted from the token ids each step
for the same reason. docs/adr/0019-sampling.md has the reasons and the cost.

A row whose logits are not finite, or that has no token left, is None in the answer and named in `failures`; the other
rows do not notice. Knows nothing of blocks, of the model, or of when a sequence ends.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain

import torch
from torch import Tensor

from engine_worker.execution.counter_based_noise import draw_key, gumbel_noise
from engine_worker.scheduling.sequence import Sequence
from shared.messages import SamplingParams

# Tokens of one group of the two-level draw. Part of the answer: another value draws other tokens for the same seed.
# 128 divides the vocabularies of Llama 3 (128256), Qwen (151936) and SmolLM2 (49152), so their logits need no padding.
_GROUP_SIZE = 128

# Below this a temperature divides fp32 logits to infinity; far above it the draw already is the argmax.
_MIN_TEMPERATURE = 1e-30


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> tuple[list[int | None], dict[str, str]]:
        """`logits[i]` belongs to `sequences[i]`. Leaves `logits` as they are."""
        assert logits.shape == (len(sequences), self._vocab_size)
        scores, failures = self._adjusted(logits, sequences)
        best, token_ids = scores.max(dim=-1)
        random_rows = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
        if random_rows:
            rows = torch.tensor(random_rows, device=logits.device)
            drawn = _draw(scores[rows], best[rows, None], [sequences[row] for row in random_rows])
            token_ids = token_ids.index_copy(0, rows, drawn)
        for row, score in enumerate(best.tolist()):
            if not math.isfinite(score):
                failures.setdefault(sequences[row].request_id, _failure_message(score))
        chosen = zip(token_ids.tolist(), sequences, strict=True)
        return [None if sequence.request_id in failures else token_id for token_id, sequence in chosen], failures

    def _adjusted(self, logits: Tensor, sequences: list[Sequence]) -> tuple[Tensor, dict[str, str]]:
        """In fp32, with what can change even a greedy choice: masks, biases and penalties."""
        masked = [self._masked_token_ids(sequence) for sequence in sequences]
        if not any(masked) and not any(_changes_scores(sequence.sampling) for sequence in sequences):
            return logits.float(), {}
        scores = logits.to(torch.float32, copy=True)
        scores[_entries(masked, scores.device)] = -math.inf
        failures = self._add_logit_bias(scores, sequences)
        _apply_penalties(scores, sequences)
        return scores, failures

    def _masked_token_ids(self, sequence: Sequence) -> list[int]:
        """The tokens that would end `sequence` before its min_tokens."""
        sampling = sequence.sampling
        if len(sequence.output_token_ids) >= sampling.min_tokens:
            return []
        ending = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self._eos_token_ids)
        return [token_id for token_id in ending if 0 <= token_id < self._vocab_size]

    def _add_logit_bias(self, scores: Tensor, sequences: list[Sequence]) -> dict[str, str]:
        failures: dict[str, str] = {}
        biases: list[dict[int, float]] = []
        for sequence in sequences:
            bias = sequence.sampling.logit_bias
            outside = [token_id for token_id in bias if not 0 <= token_id < self._vocab_size]
            if outside:
                known = f"the vocabulary has {self._vocab_size}"
                failures[sequence.request_id] = f"logit_bias names token {outside[0]}; {known}"
            biases.append({} if outside else bias)
        values = [value for bias in biases for value in bias.values()]
        scores[_entries(biases, scores.device)] += torch.tensor(values, device=scores.device)
        return failures


def _changes_scores(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias) or _has_penalty(sampling)


def _has_penalty(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _apply_penalties(scores: Tensor, sequences: list[Sequence]) -> None:
    """Repetition over prompt and output (as `transformers`); frequency and presence over the output (as OpenAI)."""
    counts = [_token_counts(sequence) for sequence in sequences]
    if not any(counts):
        return
    rows, columns = _entries(counts, scores.device)
    times = list(chain.from_iterable(counted.values() for counted in counts))
    count = torch.tensor(times, device=scores.device)
    repetition, frequency, presence = torch.tensor(
        [(s.sampling.repetition_penalty, s.sampling.frequency_penalty, s.sampling.presence_penalty) for s in sequences],
        device=scores.device,
    )[rows].unbind(dim=1)
    values = scores[rows, columns]
    values = torch.where(values > 0, values / repetition, values * repetition)
    scores[rows, columns] = values - frequency * count - presence * (count > 0)


def _token_counts(sequence: Sequence) -> dict[int, int]:
    """Token id -> times in the output, for every token that a penalty of this sequence can touch."""
    sampling = sequence.sampling
    if not _has_penalty(sampling):
        return {}
    counts = dict.fromkeys(sequence.prompt_token_ids, 0) if sampling.repetition_penalty != 1.0 else {}
    counts.update(Counter(sequence.output_token_ids))
    return counts


def _draw(scores: Tensor, best: Tensor, sequences: list[Sequence]) -> Tensor:
    """One token id for each row of `scores`, which it overwrites; `best` [R, 1] is each row's maximum.

    Gumbel-max in two levels: argmax(log(mass of a group) + noise) draws the group, argmax(log weight + noise) the token
    in it. Exactly the categorical distribution, for V/128 + 128 hashes a row in place of V.
    """
    samplings = [sequence.sampling for sequence in sequences]
    temperatures = [max(sampling.temperature, _MIN_TEMPERATURE) for sampling in samplings]
    log_weights = scores.sub_(best).div_(torch.tensor(temperatures, device=scores.device)[:, None])
    weights = log_weights.exp()
    floor = _floor(log_weights, weights, samplings)
    if floor is not None:
        weights.mul_(log_weights >= floor)

    padding = -scores.shape[1] % _GROUP_SIZE
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
        log_weights = torch.nn.functional.pad(log_weights, (0, padding), value=-math.inf)
    groups = weights.view(len(sequences), -1, _GROUP_SIZE)
    keys = [draw_key(s.sampling.seed, len(s.output_token_ids)) for s in sequences]
    group_ids = torch.arange(groups.shape[1], device=scores.device).expand(len(sequences), -1)
    group = (groups.sum(dim=-1).log() + gumbel_noise(keys, 0, group_ids)).argmax(dim=-1, keepdim=True)
    token_ids = group * _GROUP_SIZE + torch.arange(_GROUP_SIZE, device=scores.device)
    kept = log_weights.gather(1, token_ids)
    if floor is not None:
        kept = kept.masked_fill(kept < floor, -math.inf)
    within = (kept + gumbel_noise(keys, 1, token_ids)).argmax(dim=-1, keepdim=True)
    return token_ids.gather(1, within).squeeze(1)


def _floor(log_weights: Tensor, weights: Tensor, samplings: list[SamplingParams]) -> Tensor | None:
    """The least log weight [R, 1] that min-p, top-k and top-p keep together; None when no row asks for any.

    All three keep a prefix of the row in descending order, so one number says what is kept. Equal weights at the edge
    are kept together: which of them a sort puts first must not decide.
    """
    sorting_rows = [row for row, sampling in enumerate(samplings) if sampling.top_k > 0 or sampling.top_p < 1.0]
    if not sorting_rows and all(sampling.min_p <= 0.0 for sampling in samplings):
        return None
    device = log_weights.device
    min_log = [math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf for sampling in samplings]
    floor = torch.tensor(min_log, device=device)[:, None]
    if sorting_rows:
        rows = torch.tensor(sorting_rows, device=device)
        vocab_size = log_weights.shape[1]
        limits = [(samplings[row].top_k or vocab_size, samplings[row].top_p) for row in sorting_rows]
        top_k, top_p = torch.tensor(limits, device=device, dtype=torch.float64).unsqueeze(-1).unbind(dim=1)
        mass = weights.sum(dim=-1, keepdim=True)[rows]
        floor[rows] = _prefix_floor(log_weights[rows], mass, floor[rows], top_k, top_p)
    return floor


def _prefix_floor(
    log_weights: Tensor, mass: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor, num_sorted: int = 128
) -> Tensor:
    """`floor` raised by top-k, then by top-p of what is left.

    Sorts the `num_sorted` largest, and eight times as many of the rows for which these do not decide: sorting a whole
    vocabulary of 49152 takes a CPU 3.5 ms a row, its 128 largest 0.07 ms, and a nucleus is seldom larger.
    """
    vocab_size = log_weights.shape[1]
    num_sorted = min(num_sorted, vocab_size)
    largest = log_weights.topk(num_sorted, dim=-1).values.double()
    left = (torch.arange(num_sorted, device=largest.device) < top_k) & (largest >= floor)
    left_weights = largest.exp() * left
    # Without top-k and min-p the whole row is left, and its mass is known before it is sorted.
    whole_row = (top_k >= vocab_size) & (floor == -math.inf)
    total = torch.where(whole_row, mass.double(), left_weights.sum(dim=-1, keepdim=True))
    before = left_weights.cumsum(dim=-1) - left_weights
    kept = left & ((top_p >= 1.0) | (before < top_p * total))
    kept[:, 0] = True  # top_p = 0 still leaves the best token
    result = largest.masked_fill(~kept, math.inf).amin(dim=-1, keepdim=True).to(floor.dtype)

    undecided = torch.where(whole_row, kept[:, -1:], left[:, -1:] & (top_k > num_sorted))
    if num_sorted < vocab_size and undecided.any():
        rows = undecided.squeeze(1).nonzero().squeeze(1)
        result[rows] = _prefix_floor(
            log_weights[rows], mass[rows], floor[rows], top_k[rows], top_p[rows], 8 * num_sorted
        )
    return result


def _failure_message(best_score: float) -> str:
    if best_score == -math.inf:
        return "no token can be sampled: every one is masked"
    return f"the model's logits are not finite ({best_score})"


def _entries(columns_of_rows: Collection[Collection[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ragged token ids, a collection for each row, as (row index, column index)."""
    lengths = torch.tensor([len(columns) for columns in columns_of_rows])
    rows = torch.arange(len(columns_of_rows)).repeat_interleave(lengths)
    columns = torch.tensor(list(chain.from_iterable(columns_of_rows)), dtype=torch.int64)
    return rows.to(device), columns.to(device)
