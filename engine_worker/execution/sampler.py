"""Logits of one step -> one token for each sequence.

    sample(logits [N, V], sequences) -> (token ids, failures)

Order of the operations (that of vLLM, so that the same parameters mean the same here):
    min_tokens mask, logit bias, repetition + frequency + presence penalties
    then argmax (greedy), or temperature, min-p, top-k, top-p and a draw

A draw depends on the distribution and on (seed, output index) alone: not on the batch, the slot, earlier draws or the
device. So preemption, resume and replay need no random state, and penalties are recounted from the token ids each step
for the same reason. docs/adr/0010-sampling.md has the reasons and the cost.

A row whose logits are not finite, or that has no token left, is None in the answer and named in `failures`; the other
rows do not notice. Knows nothing of blocks, of the model, or of when a sequence ends.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable

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
        best, token_ids = scores.float().max(dim=-1)
        random_rows = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
        if random_rows:
            rows = torch.tensor(random_rows, device=logits.device)
            drawn = _draw(scores[rows].float(), best[rows, None], [sequences[row] for row in random_rows])
            token_ids = token_ids.index_copy(0, rows, drawn)
        for row, score in enumerate(best.tolist()):
            if not math.isfinite(score):
                failures.setdefault(sequences[row].request_id, _failure_message(score))
        chosen = zip(token_ids.tolist(), sequences, strict=True)
        return [None if sequence.request_id in failures else token_id for token_id, sequence in chosen], failures

    def _adjusted(self, logits: Tensor, sequences: list[Sequence]) -> tuple[Tensor, dict[str, str]]:
        """What can change even a greedy choice. Returns `logits` itself when no sequence asks for it."""
        masked = [self._masked_token_ids(sequence) for sequence in sequences]
        if not any(masked) and not any(_changes_scores(sequence.sampling) for sequence in sequences):
            return logits, {}
        scores = logits.to(torch.float32, copy=True)
        rows, columns = _entries(masked)
        scores[_to(rows, scores), _to(columns, scores)] = -math.inf
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
        rows, columns = _entries(biases)
        values = [value for bias in biases for value in bias.values()]
        scores[_to(rows, scores), _to(columns, scores)] += torch.tensor(values, device=scores.device)
        return failures


def _changes_scores(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias) or _has_penalty(sampling)


def _has_penalty(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _apply_penalties(scores: Tensor, sequences: list[Sequence]) -> None:
    """Repetition over prompt and output (as `transformers`); frequency and presence over the output (as OpenAI)."""
    counts = [_token_counts(sequence) for sequence in sequences]
    rows, columns = (_to(indices, scores) for indices in _entries(counts))
    if not rows.numel():
        return
    count = _to([times for counted in counts for times in counted.values()], scores)
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
    groups = weights.unflatten(1, (-1, _GROUP_SIZE))
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
    vocab_size = log_weights.shape[1]
    min_log = [math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf for sampling in samplings]
    floor = torch.tensor(min_log, device=log_weights.device)[:, None]
    if all(sampling.min_p <= 0 and not _has_prefix_filter(sampling, vocab_size) for sampling in samplings):
        return None
    for_prefix = [row for row, sampling in enumerate(samplings) if _has_prefix_filter(sampling, vocab_size)]
    if for_prefix:
        rows = _to(for_prefix, log_weights)
        chosen = [samplings[row] for row in for_prefix]
        floor[rows] = _prefix_floor(log_weights[rows], weights[rows], floor[rows], chosen)
    return floor


def _has_prefix_filter(sampling: SamplingParams, vocab_size: int) -> bool:
    return 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0


def _prefix_floor(log_weights: Tensor, weights: Tensor, floor: Tensor, samplings: list[SamplingParams]) -> Tensor:
    """`floor` raised by top-k, then by top-p over what is left; sorts only as many of the largest as can matter."""
    vocab_size = log_weights.shape[1]
    top_k = _to([s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in samplings], log_weights)[:, None]
    top_p = torch.tensor([s.top_p for s in samplings], device=log_weights.device, dtype=torch.float64)[:, None]
    only_top_p = (floor == -math.inf) & (top_k == vocab_size)
    mass = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    # Tokens that each hold less than (1 - top_p) / V of the mass hold less than 1 - top_p together: top-p cuts above.
    bound = torch.where(only_top_p, ((1.0 - top_p) * mass / vocab_size).log(), floor)
    count = torch.minimum((log_weights >= bound).sum(dim=-1, keepdim=True), top_k)
    largest = log_weights.topk(max(1, int(count.max())), dim=-1).values

    rank = torch.arange(largest.shape[1], device=largest.device)
    kept = (rank < top_k) & (largest >= floor)
    kept_weights = largest.double().exp() * kept
    before = kept_weights.cumsum(dim=-1) - kept_weights
    total = torch.where(only_top_p, mass, kept_weights.sum(dim=-1, keepdim=True))
    kept &= (top_p >= 1.0) | (before < top_p * total)
    kept[:, 0] = True  # top_p = 0 still leaves the best token
    return largest.masked_fill(~kept, math.inf).amin(dim=-1, keepdim=True)


def _failure_message(best_score: float) -> str:
    if best_score == -math.inf:
        return "no token can be sampled: every one is masked"
    return f"the model's logits are not finite ({best_score})"


def _entries(columns_of_rows: Iterable[Collection[int]]) -> tuple[list[int], list[int]]:
    """Ragged columns as two flat index lists."""
    rows = [row for row, columns in enumerate(columns_of_rows) for _ in columns]
    return rows, [column for columns in columns_of_rows for column in columns]


def _to(indices: list[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64, device=like.device)
