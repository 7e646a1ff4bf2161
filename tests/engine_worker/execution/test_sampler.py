"""The sampler: exact distributions, greedy ties, penalties, reproducible draws, and logprobs."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine_worker.execution.sampling.logprobs import launch_logprobs
from engine_worker.execution.sampling.sampler import Sampler
from engine_worker.execution.sampling.sampling_inputs import LogprobRows
from engine_worker.kv.sequence import Sequence
from shared.messages import SamplingParams

VOCAB_SIZE = 300  # three groups, the last one padded
EOS = 7
NUM_DRAWS = 5_000


def sequence(
    request_id: str = "a", prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any
) -> Sequence:
    params = SamplingParams(**{"max_tokens": 100, "seed": 0, **sampling})
    return Sequence(request_id, prompt or [1], params, output_token_ids=output or [])


def sampler(vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(vocab_size, eos_token_ids=[EOS], max_rows=NUM_DRAWS)


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int | None], dict[str, str]]:
    samples = sampler(logits.shape[1]).sample(logits, sequences)
    return samples.token_ids, {sequences[row].request_id: text for row, text in samples.failures.items()}


def random_logits(rows: int, vocab_size: int = VOCAB_SIZE, scale: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits: torch.Tensor, **kwargs: Any) -> np.ndarray:
    """Return how often each token was drawn with NUM_DRAWS seeds."""
    sequences = [sequence(str(seed), seed=seed, **kwargs) for seed in range(NUM_DRAWS)]
    token_ids, failures = sample(logits.expand(NUM_DRAWS, -1), sequences)
    assert not failures
    return np.bincount(np.array(token_ids), minlength=logits.shape[0])


def reference_distribution(logits: torch.Tensor, seq: Sequence) -> np.ndarray:
    """Compute the distribution from the definitions, one token at a time, in float64."""
    s = seq.sampling
    scores = logits.double().numpy().copy()
    if len(seq.output_token_ids) < s.min_tokens:
        for token_id in (*s.stop_token_ids, *([] if s.ignore_eos else [EOS])):
            scores[token_id] = -np.inf
    for token_id, bias in s.logit_bias.items():
        scores[token_id] += bias
    for token_id in set(seq.prompt_token_ids) | set(seq.output_token_ids):
        scores[token_id] *= s.repetition_penalty if scores[token_id] < 0 else 1 / s.repetition_penalty
    for token_id in set(seq.output_token_ids):
        scores[token_id] -= s.frequency_penalty * seq.output_token_ids.count(token_id) + s.presence_penalty
    weights = np.exp((scores - scores.max()) / s.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = [token_id for token_id in order if weights[token_id] >= s.min_p]
    kept = kept[: s.top_k] if s.top_k else kept
    total, cumulative, nucleus = weights[kept].sum(), 0.0, list[int]()
    for token_id in kept:
        if nucleus and cumulative >= s.top_p * total:
            break
        nucleus.append(token_id)
        cumulative += weights[token_id]
    distribution = np.zeros_like(weights)
    distribution[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return distribution


def assert_drawn_from(counts: np.ndarray, expected: np.ndarray) -> None:
    """Check the chi-square goodness of fit within 5 sigma. Tokens expected less than 5 times form one cell."""
    assert not counts[expected == 0].any(), "a token with probability 0 was drawn"
    expected = expected * counts.sum()
    rare = expected < 5
    observed_cells = np.append(counts[~rare], counts[rare].sum())
    expected_cells = np.append(expected[~rare], expected[rare].sum())
    observed_cells, expected_cells = observed_cells[expected_cells > 0], expected_cells[expected_cells > 0]
    degrees = max(len(expected_cells) - 1, 1)
    statistic = ((observed_cells - expected_cells) ** 2 / expected_cells).sum()
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 10},
        {"top_k": VOCAB_SIZE + 50},
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"top_p": 0.9, "temperature": 30.0},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 200, "top_p": 0.95, "temperature": 5.0},
        {"min_p": 0.02, "top_p": 0.6},
        {"min_p": 0.01, "top_k": 12, "top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.5, "top_k": 250, "temperature": 20.0},
        {"repetition_penalty": 1.8, "prompt": [0, 1, 2, 2], "output": [3, 3, 4]},
        {"repetition_penalty": 0.7, "prompt": [0, 1], "output": []},
        {"frequency_penalty": 0.9, "prompt": [5], "output": [3, 3, 3, 9]},
        {"presence_penalty": 1.5, "prompt": [5], "output": [3, 3, 3, 9]},
        {"presence_penalty": -1.0, "frequency_penalty": -0.5, "output": [8, 8]},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2, "output": [8, 8], "top_p": 0.9},
        {"logit_bias": {0: 3.0, 299: -4.0}},
        {"min_tokens": 2, "output": [3], "stop_token_ids": (4, 5), "logit_bias": {4: 100.0, EOS: 100.0}},
        {"min_tokens": 2, "output": [3], "ignore_eos": True, "stop_token_ids": (4,)},
    ],
    ids=str,
)
def test_sampler_draws_follow_exact_distribution(params: dict[str, Any]) -> None:
    logits = random_logits(1)[0]
    assert_drawn_from(draws(logits, **params), reference_distribution(logits, sequence(**params)))


def test_sampler_wide_nucleus_is_exact() -> None:
    """top-p over 1500 similar tokens needs most of them: the sort grows (128, 1024, all) until it has enough."""
    logits = random_logits(1, vocab_size=1500, scale=0.1)[0]
    expected = reference_distribution(logits, sequence(top_p=0.9))
    assert (expected > 0).sum() > 1024
    assert_drawn_from(draws(logits, top_p=0.9), expected)


def test_sampler_narrow_and_wide_nucleus_in_one_batch() -> None:
    logits = torch.cat([random_logits(1, 5000, scale=0.1), random_logits(1, 5000, scale=6.0)])
    together = [sequence("wide", top_p=0.9, seed=3), sequence("narrow", top_p=0.9, seed=4)]
    token_ids, _ = sample(logits, together)
    alone = [sample(logits[row : row + 1], [together[row]])[0][0] for row in (0, 1)]
    assert token_ids == alone


def test_sampler_greedy_takes_first_argmax() -> None:
    logits = random_logits(4)
    logits[3, [20, 200]] = 50.0
    token_ids, failures = sample(logits, [sequence(str(row), temperature=0.0) for row in range(4)])
    assert (token_ids, failures) == (logits.argmax(-1).tolist(), {})
    assert token_ids[3] == 20


def test_sampler_greedy_applies_penalties_bias_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [EOS, 10, 11, 12]] = torch.tensor([9.0, 8.0, 7.0, 6.0])

    def greedy(**params: Any) -> int | None:
        return sample(logits, [sequence(temperature=0.0, **params)])[0][0]

    assert greedy() == EOS
    assert greedy(min_tokens=1) == 10
    assert greedy(min_tokens=1, output=[3]) == EOS
    assert greedy(min_tokens=1, stop_token_ids=(10,)) == 11
    assert greedy(min_tokens=1, ignore_eos=True) == EOS
    assert greedy(logit_bias={12: 100.0}) == 12
    assert greedy(logit_bias={EOS: -100.0, 10: -100.0}) == 11
    assert greedy(repetition_penalty=1.5, prompt=[EOS, 10]) == 11
    assert greedy(frequency_penalty=0.6, output=[EOS, EOS]) == 10
    assert greedy(presence_penalty=0.6, output=[EOS, EOS]) == EOS


def test_repetition_penalty_lowers_negative_logit() -> None:
    logits = torch.full((1, VOCAB_SIZE), -10.0)
    logits[0, [10, 11]] = torch.tensor([-1.0, -1.4])
    seq = sequence(temperature=0.0, repetition_penalty=1.5, prompt=[10])
    assert sample(logits, [seq])[0] == [11]


def test_output_penalties_ignore_the_prompt() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 10] = 9.0
    seq = sequence(temperature=0.0, repetition_penalty=1.01, presence_penalty=10.0, frequency_penalty=10.0, prompt=[10])
    assert sample(logits, [seq])[0] == [10]


def test_sampler_does_not_change_logits() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [sequence("a", top_p=0.5, repetition_penalty=2.0), sequence("b", temperature=0.0)])
    assert torch.equal(logits, before)


def mixed_batch() -> list[Sequence]:
    return [
        sequence("plain", seed=1, output=[5] * 3),
        sequence("greedy", seed=2, temperature=0.0),
        sequence("nucleus", seed=3, top_p=0.8, output=[9]),
        sequence("k", seed=4, top_k=5, temperature=1.7),
        sequence("penalties", seed=5, repetition_penalty=1.3, frequency_penalty=0.4, prompt=[1, 2, 3], output=[4, 4]),
        sequence("biased", seed=6, temperature=0.0, logit_bias={3: 5.0}, min_tokens=3),
        sequence("floor", seed=7, min_p=0.1),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sampler_result_is_independent_of_batch_and_slot(dtype: torch.dtype) -> None:
    sequences, logits = mixed_batch(), random_logits(7).to(dtype)
    alone = [sample(logits[row : row + 1], [seq])[0][0] for row, seq in enumerate(sequences)]
    for order in (list(range(7)), [6, 2, 0, 4, 1, 5, 3], [3, 4], [1, 5]):
        token_ids, _ = sample(logits[order], [sequences[row] for row in order])
        assert token_ids == [alone[row] for row in order]


def test_sampler_resumed_sequence_continues_unchanged() -> None:
    logits = random_logits(40)

    def run(seq: Sequence, start: int) -> list[int]:
        for row in range(start, 40):
            token_ids, _ = sample(logits[row : row + 1], [seq])
            assert token_ids[0] is not None
            seq.output_token_ids.append(token_ids[0])
        return seq.output_token_ids

    params: dict[str, Any] = {
        "seed": 9,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "top_p": 0.95,
        "min_tokens": 20,
    }
    undisturbed = run(sequence(**params), 0)
    resumed = run(sequence("other", output=undisturbed[:17], **params), 17)
    assert resumed == undisturbed


def test_sampler_each_index_and_seed_has_its_own_draw() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    by_index = [sample(logits, [sequence(seed=1, output=[0] * n)])[0][0] for n in range(64)]
    by_seed = [sample(logits, [sequence(seed=n)])[0][0] for n in range(64)]
    # 64 draws of 300 hit 57.6 different tokens on average, with a standard deviation of 2.3.
    assert len(set(by_index)) > 48
    assert len(set(by_seed)) > 48


def test_sampler_stream_of_a_seed_is_pinned() -> None:
    """Other tokens for the same seed would break resume between versions. Change this only on purpose."""
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)[None] / 100
    drawn = [sample(logits, [sequence(seed=42, output=[0] * n)])[0][0] for n in range(8)]
    assert drawn == [99, 272, 244, 287, 130, 156, 252, 52]


def test_sampler_non_finite_rows_fail_alone() -> None:
    logits = random_logits(5)
    healthy = logits.clone()
    logits[1, 5], logits[2, 6], logits[3] = math.nan, math.inf, -math.inf
    edits: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.9}, {"repetition_penalty": 1.5, "top_k": 3}]
    for params in edits:
        sequences = [sequence(str(row), seed=row, **params) for row in range(5)]
        token_ids, failures = sample(logits, sequences)
        expected, _ = sample(healthy, sequences)
        assert token_ids == [expected[0], None, None, None, expected[4]]
        assert failures == {
            "1": "the model's logits are not finite (nan)",
            "2": "the model's logits are not finite (inf)",
            "3": "no token can be sampled: all are masked",
        }


def test_sampler_fully_masked_row_fails() -> None:
    everything = tuple(range(VOCAB_SIZE))
    sequences = [sequence("all", stop_token_ids=everything, min_tokens=1), sequence("none")]
    token_ids, failures = sample(random_logits(2), sequences)
    assert token_ids[0] is None
    assert token_ids[1] is not None
    assert list(failures) == ["all"]


def test_sampler_bias_outside_vocabulary_fails_row() -> None:
    sequences = [sequence("bad", logit_bias={VOCAB_SIZE: 1.0}), sequence("good", logit_bias={0: 100.0})]
    token_ids, failures = sample(random_logits(2), sequences)
    assert token_ids == [None, 0]
    assert failures == {"bad": "logit_bias: expected token ids below 300, got 300"}


def test_sampler_stop_token_outside_vocabulary_is_ignored() -> None:
    logits = random_logits(1)
    known, unknown = sequence(), sequence(stop_token_ids=(10**6, -1), min_tokens=1, ignore_eos=True)
    assert sample(logits, [known]) == sample(logits, [unknown])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-6},
        {"temperature": 1e-40},
        {"top_p": 1e-9},
        {"top_p": 0.0},
        {"top_k": 1, "temperature": 100.0},
        {"min_p": 1.0},
        {"logit_bias": {123: 100.0}},
    ],
    ids=str,
)
def test_sampler_extreme_parameters_leave_one_token(params: dict[str, Any]) -> None:
    logits = random_logits(50)
    winner = logits.argmax(-1).tolist() if "logit_bias" not in params else [123] * 50
    token_ids, failures = sample(logits, [sequence(str(row), seed=row, **params) for row in range(50)])
    assert (token_ids, failures) == (winner, {})


def test_sampler_bias_of_minus_100_bans_token() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[3] = 20.0
    counts = draws(logits, logit_bias={3: -100.0})
    assert counts[3] == 0


def test_top_k_keeps_ties_at_its_edge() -> None:
    logits = torch.full((VOCAB_SIZE,), -20.0)
    logits[[10, 20, 30]] = 1.0
    assert_drawn_from(draws(logits, top_k=2), np.bincount([10, 20, 30], minlength=VOCAB_SIZE) / 3)


def test_sampler_three_phases_equal_sample() -> None:
    """prepare() sees the number of output tokens, not their ids, so it can run before they are known."""
    sequences, logits = [seq for seq in mixed_batch() if not seq.sampling.has_penalties], random_logits(6)
    expected = sampler().sample(logits, sequences)
    for seq in sequences:
        seq.output_token_ids[:] = [299] * seq.num_output_tokens
    inputs = sampler().prepare(sequences)
    tokens = sampler().launch(logits, inputs)
    assert tokens.token_ids.tolist() == expected.token_ids
    assert tokens.collect() == expected


def test_logprobs_are_computed_before_sampling_changes() -> None:
    logits = random_logits(4)
    changes: dict[str, Any] = {"temperature": 0.5, "logit_bias": {3: 50.0}, "presence_penalty": 1.0, "top_p": 0.5}
    sequences = [
        sequence("top", logprobs=5),
        sequence("changed", logprobs=2, output=[1], **changes),
        sequence("silent"),
        sequence("chosen", logprobs=0, temperature=0.0),
    ]
    samples = sampler().sample(logits, sequences)
    exact = logits.double().log_softmax(-1)
    assert samples.logprobs[2] is None
    assert samples.token_ids[1] == 3
    for row, num_top in ((0, 5), (1, 2), (3, 0)):
        token_id, logprobs = samples.token_ids[row], samples.logprobs[row]
        assert token_id is not None and logprobs is not None
        assert logprobs.logprob == pytest.approx(exact[row, token_id].item(), abs=1e-5)  # fp32 sums of 300 terms
        top = exact[row].topk(num_top)
        assert list(logprobs.top_token_ids) == top.indices.tolist()
        assert list(logprobs.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-5)
    assert sampler().sample(logits[2:3], sequences[2:3]).logprobs == []


def test_sampler_greedy_tie_takes_lowest_id() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [7, 40, 256]] = 3.0
    assert sample(logits, [sequence("greedy", temperature=0.0)])[0] == [7]


@pytest.mark.parametrize("chosen", [7, 40, 256, 299])
def test_logprobs_ties_list_chosen_token_then_lowest_ids(chosen: int) -> None:
    logits = torch.zeros(1, 300)
    logits[0, [7, 40, 256]] = 3.0
    logits[0, 100] = torch.tensor(3.0).nextafter(torch.tensor(4.0))  # one representable step more
    asked = LogprobRows(torch.tensor([0]), [4], [()], None)
    (found,) = launch_logprobs(logits, torch.tensor([chosen]), asked).to_host().per_row(1)
    assert found is not None
    others = [token_id for token_id in (7, 40, 256) if token_id != chosen]
    assert list(found.top_token_ids) == ([100, chosen, *others] if chosen != 299 else [100, 7, 40, 256])
    assert list(found.top_logprobs) == sorted(found.top_logprobs, reverse=True)
    assert found.top_logprobs[1:] == (found.top_logprobs[1],) * 3
    assert found.logprob == pytest.approx(logits.double().log_softmax(-1)[0, chosen].item(), abs=1e-6)


@pytest.mark.parametrize("num_top", [1, 2, 5])
def test_logprobs_chosen_token_tying_with_last_is_listed(num_top: int) -> None:
    logits = torch.zeros(1, 300)
    asked = LogprobRows(torch.tensor([0]), [num_top], [()], None)
    (found,) = launch_logprobs(logits, torch.tensor([200]), asked).to_host().per_row(1)
    assert found is not None and found.top_token_ids[0] == 200 and len(set(found.top_token_ids)) == num_top
