"""Allowed tokens, bad words, and named logprobs: for one row, and through preemption and takeover."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.execution.sampling.sampler import Sampler
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from shared.messages import ErrorEvent, FinishEvent, FinishReason, GenerationRequest, Grammar, GrammarKind, StoredChoice
from tests.builders import Transcript, make_request, make_sequence, run_to_end
from tests.engine_worker.execution.reference import (
    make_engine,
    make_runner,
    run_engine,
    run_engine_to_end,
    write_model_of_words,
)
from tests.tiny_model import IM_END, VOCAB_SIZE

WORDS = 100  # not a multiple of 32
LOGITS = -torch.arange(WORDS, dtype=torch.float32)[None]  # token 0 is the most likely, then 1, 2, ...


def chosen(output: tuple[int, ...] = (), **sampling: Any) -> int | None:
    (token_id,) = (
        Sampler(WORDS, [99], max_rows=8)
        .sample(LOGITS, [make_sequence(3, output_token_ids=output, **sampling)])
        .token_ids
    )
    return token_id


def test_allowed_tokens_are_the_only_ones_sampled() -> None:
    assert chosen(allowed_token_ids=(98, 31, 64)) == 31
    assert chosen(allowed_token_ids=(98,), logit_bias={5: 100.0}) == 98
    assert chosen(allowed_token_ids=(99, 40), min_tokens=1) == 40  # 99 is EOS
    drawn = {chosen(allowed_token_ids=(3, 96), temperature=50.0, seed=seed) for seed in range(40)}
    assert drawn == {3, 96}


def test_token_rules_apply_per_row_and_keep_logits() -> None:
    logits = LOGITS.repeat(4, 1)
    sequences = [
        make_sequence(3),
        make_sequence(3, allowed_token_ids=(7, 8)),
        make_sequence(3, bad_words=((0,), (1,))),
        make_sequence(3, allowed_token_ids=(0, 9), bad_words=((0,),)),
    ]
    sampler = Sampler(WORDS, [99], max_rows=8)
    assert sampler.sample(logits, sequences).token_ids == [0, 7, 2, 9]
    assert sampler.sample(logits[1:], sequences[1:]).token_ids == [7, 2, 9]
    assert sampler.sample(logits[:1], [make_sequence(3)]).token_ids == [0]
    assert torch.equal(logits, LOGITS.repeat(4, 1))


@pytest.mark.parametrize(
    ("output", "words", "expected"),
    [
        ((), ((0,),), 1),
        ((5,), ((5, 0),), 1),
        ((4,), ((5, 0),), 0),
        ((), ((5, 0),), 0),
        ((5, 6), ((5, 6, 0), (6, 1), (2,)), 3),
        ((5, 6, 7), ((5, 6, 0),), 0),
        ((6, 5), ((5, 0), (5, 1), (6, 5, 2)), 3),
    ],
)
def test_bad_word_is_never_completed(
    output: tuple[int, ...], words: tuple[tuple[int, ...], ...], expected: int
) -> None:
    assert chosen(output, bad_words=words) == expected


def test_bad_word_across_prompt_end_is_not_matched() -> None:
    sequence = make_sequence([5], bad_words=((5, 0),))
    assert Sampler(WORDS, [99], max_rows=8).sample(LOGITS, [sequence]).token_ids == [0]


def test_bad_word_can_begin_with_token_in_flight() -> None:
    sampler, sequence = Sampler(WORDS, [99], max_rows=8), make_sequence(3, bad_words=((0, 0),))
    first = sampler.launch(LOGITS, sampler.prepare([sequence], [0]))
    second = sampler.launch(LOGITS, sampler.prepare([sequence], [1]))  # before the first token is in the output
    assert (first.collect().token_ids, second.collect().token_ids) == ([0], [1])


def test_token_rules_combine_with_grammar(model_dir: Path) -> None:
    runner = make_runner(model_dir, num_blocks=50, block_size=8)
    grammar = Grammar(GrammarKind.REGEX, "[abc]{20}")
    a, b, c = 67, 68, 69
    allowed = (a, b, 70, IM_END)
    sampling = {"max_tokens": 40, "temperature": 1.0, "stop_token_ids": (IM_END,)}
    request = make_request(PROMPT, "both", grammar=grammar, allowed_token_ids=allowed, bad_words=((a, a),), **sampling)
    tokens = run_engine(runner, [request], **CONFIG).tokens["both"]
    assert tokens[-1] == IM_END and set(tokens[:-1]) == {a, b} and c not in tokens
    assert not has(tokens, (a, a))


def test_named_logprobs_replace_top_logprobs() -> None:
    sequences = [
        make_sequence(3, logprobs=0, logprob_token_ids=(50, 2, 9)),
        make_sequence(3, logprobs=2),
        make_sequence(3, logprobs=0, logprob_token_ids=(1,), allowed_token_ids=(4,)),
        make_sequence(3, logprobs=0),
    ]
    samples = Sampler(WORDS, [99], max_rows=8).sample(LOGITS.repeat(4, 1), sequences)
    exact = LOGITS[0].double().log_softmax(-1)
    for (logprobs, token_id), names in zip(
        zip(samples.logprobs, (0, 0, 4, 0), strict=True), ([50, 2, 9], [0, 1], [1], []), strict=True
    ):
        assert logprobs is not None and list(logprobs.top_token_ids) == names
        assert logprobs.logprob == pytest.approx(exact[token_id].item(), abs=1e-5)
        assert list(logprobs.top_logprobs) == pytest.approx(exact[names].tolist(), abs=1e-5)
    assert math.isfinite(samples.logprobs[0].top_logprobs[0])  # type: ignore[union-attr]


PROMPT = list(range(20, 35))
CONFIG: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_of_words(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return make_runner(model_dir, num_blocks=200, block_size=8)


def requests(words: tuple[tuple[int, ...], ...] = ()) -> list[GenerationRequest]:
    """Return requests with few allowed tokens, so that every bad word would occur again."""
    sampling = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "n": 3, "allowed_token_ids": tuple(range(100, 108))}
    return [make_request(PROMPT, name, seed=seed, bad_words=words, **sampling) for seed, name in enumerate("abcd")]


def has(tokens: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(tokens[start : start + len(word)]) == word for start in range(len(tokens)))


def choices(transcript: Transcript) -> list[list[int]]:
    return [transcript.choice(name, choice) for name in "abcd" for choice in range(3)]


@pytest.fixture(scope="module")
def words(runner: ModelRunner) -> tuple[tuple[int, ...], ...]:
    """Return a pair and a triple that occur in outputs without bad words."""
    free = choices(run_engine(runner, requests(), **CONFIG))
    pair, triple = tuple(free[0][:2]), tuple(free[1][:3])
    assert all({100, 101, 102, 103, 104, 105, 106, 107}.issuperset(tokens) for tokens in free)
    return pair, triple


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, words: tuple[tuple[int, ...], ...]) -> Transcript:
    return run_engine(runner, requests(words), **CONFIG)


def test_bad_words_never_occur_in_sequences(expected: Transcript, words: tuple[tuple[int, ...], ...]) -> None:
    for tokens in choices(expected):
        assert len(tokens) == NUM_TOKENS and {*range(100, 108)}.issuperset(tokens)
        assert not any(has(tokens, word) for word in words)
    assert {end.reason for end in expected.ends.values() if isinstance(end, FinishEvent)} == {FinishReason.LENGTH}


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_host_blocks", [0, 96], ids=["recompute", "swap"])
def test_token_rules_preemption_does_not_change_outputs(
    model_dir: Path, expected: Transcript, words: tuple[tuple[int, ...], ...], num_host_blocks: int, ahead: bool
) -> None:
    runner = make_runner(model_dir, num_blocks=60, block_size=8, num_host_blocks=num_host_blocks)
    mode = PreemptionMode.SWAP if num_host_blocks else PreemptionMode.RECOMPUTE
    engine = make_engine(runner, preemption_mode=mode, async_scheduling=ahead, **CONFIG)
    found = run_engine_to_end(engine, requests(words))
    assert sum(engine.stats().counters.preemptions.values()) > 0
    assert choices(found) == choices(expected)


def test_token_rules_resumed_request_continues_unchanged(
    runner: ModelRunner, expected: Transcript, words: tuple[tuple[int, ...], ...]
) -> None:
    whole = [expected.choice("b", choice) for choice in range(3)]
    engine, transcript = make_engine(runner, **CONFIG), Transcript()
    stored = [StoredChoice(token_ids=token_ids[:cut]) for token_ids, cut in zip(whole, (1, 2, 31), strict=True)]
    for choice, kept in enumerate(stored):
        transcript.resume("b", kept.token_ids, choice)
    engine.add_request(requests(words)[1], stored)
    run_to_end(engine, transcript)
    assert [transcript.choice("b", choice) for choice in range(3)] == whole


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": (VOCAB_SIZE,)}, f"allowed_token_ids holds {VOCAB_SIZE}"),
        ({"bad_words": ((1, VOCAB_SIZE),)}, f"bad_words holds {VOCAB_SIZE}"),
        ({"bad_words": ((),)}, "a word without tokens"),
        ({"logprobs": 0, "logprob_token_ids": (-1,)}, "logprob_token_ids holds -1"),
        ({"bad_words": ((1,),), "use_beam_search": True, "beam_width": 2}, "bad_words: not supported with beam search"),
        ({"allowed_token_ids": (5,), "bad_words": ((5,),)}, "all are masked"),
    ],
)
def test_token_rules_invalid_end_only_their_request(
    runner: ModelRunner, sampling: dict[str, Any], problem: str
) -> None:
    good = make_request(PROMPT, "good", allowed_token_ids=(30,))
    found = run_engine(runner, [make_request(PROMPT, "bad", **sampling), good], **CONFIG)
    assert found.tokens["good"] == [30] * 8
    end = found.ends["bad"]
    assert isinstance(end, ErrorEvent) and problem in end.message
