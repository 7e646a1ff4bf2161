"""Drafts change no token: the tiny model in float32 with every proposer, beside no speculation at all."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.drafting import Proposer
from engine_worker.scheduling.speculation.proposers import PROPOSERS
from shared.messages import GenerationRequest
from tests.builders import Transcript, drafting_by, make_request
from tests.engine_worker.execution.reference import make_engine, make_runner, run_engine_to_end, write_model
from tests.proposers import FunctionProposer

NUM_REQUESTS = 80  # for each proposer and number of drafts
MANY = [NUM_REQUESTS, pytest.param(500, marks=pytest.mark.long)]
VOCAB_SIZE = 128  # small, so that outputs repeat and drafts are often right
MAX_SAMPLES = 16  # of the runner
ROOMY: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def runner(directory: Path) -> ModelRunner:
    return make_runner(directory, num_blocks=512, block_size=16)


@pytest.fixture(scope="module")
def plain(runner: ModelRunner) -> Callable[[int], Transcript]:
    """Return a function that runs so many requests without drafts, once."""
    return cache(lambda count: run(runner, None, 0, count))


@cache
def mixed_requests(count: int = NUM_REQUESTS) -> list[GenerationRequest]:
    """Return requests with every parameter that the sampler reads, most of them with repeated prompts."""
    random = Random(5)
    requests = []
    for number in range(count):
        words = [random.randrange(3, VOCAB_SIZE) for _ in range(random.choice([1, 4, 9]))]
        params: dict[str, Any] = {
            "max_tokens": random.randint(1, 40),
            "ignore_eos": random.random() < 0.7,
            "seed": number,
            "temperature": random.choice([0.0, 0.0, 0.7, 1.3]),
            "top_p": random.choice([1.0, 0.9]),
            "top_k": random.choice([0, 5]),
            "n": random.choice([1, 1, 1, 3]),
            "logprobs": random.choice([None, None, 2]),
            "min_tokens": random.choice([0, 0, 1]),
            "stop_token_ids": random.choice([(), (random.randrange(3, VOCAB_SIZE),)]),
            "logit_bias": random.choice([{}, {random.randrange(3, VOCAB_SIZE): 4.0}]),
            "bad_words": random.choice([(), ((random.randrange(3, VOCAB_SIZE), random.randrange(3, VOCAB_SIZE)),)]),
        }
        kind = random.choice(["presence_penalty", "frequency_penalty", "repetition_penalty", "", ""])
        if kind:
            params[kind] = 1.1
        requests.append(make_request(words * random.randint(1, 12), f"r{number:03}", **params))
    return requests


def run(
    runner: ModelRunner,
    proposer: Proposer | None,
    max_drafts: int,
    count: int = NUM_REQUESTS,
    max_samples: int = MAX_SAMPLES,
    **config: Any,
) -> Transcript:
    drafting = drafting_by(proposer, max_drafts, max_samples=max_samples) if proposer is not None else None
    engine = make_engine(runner, drafting=drafting, **{**ROOMY, **config})
    transcript = run_engine_to_end(engine, mixed_requests(count))
    assert engine.stats().kv_cache.num_active_blocks == 0
    return transcript


def random_tokens() -> Proposer:
    random = Random(3)
    return FunctionProposer(lambda _: [random.randrange(VOCAB_SIZE) for _ in range(random.randint(0, 7))])


def oracle(known: Transcript) -> Proposer:
    """Propose what the run without speculation gave."""

    def rest(sequence: Sequence) -> list[int]:
        return known.choice(sequence.request_id, sequence.sequence_index)[sequence.num_output_tokens :]

    return FunctionProposer(rest)


def ngram(_: Transcript) -> Proposer:
    return PROPOSERS["ngram"](SpeculativeConfig(method="ngram", prompt_lookup_min=1))


def suffix(_: Transcript) -> Proposer:
    return PROPOSERS["suffix"](SpeculativeConfig(method="suffix"))


MAKERS: dict[str, Callable[[Transcript], Proposer]] = {
    "ngram": ngram,
    "suffix": suffix,
    "random": lambda _: random_tokens(),
    "oracle": oracle,
}


def answers(transcript: Transcript) -> Any:
    """Return all tokens and ends; how many tokens of a prompt were cached depends on the order of the requests."""
    ends = {request_id: getattr(end, "reason", end) for request_id, end in transcript.ends.items()}
    return transcript.tokens, transcript.others, ends, transcript.choice_ends


@pytest.mark.parametrize("count", MANY)
@pytest.mark.parametrize("max_drafts", [1, 3, 7])
@pytest.mark.parametrize("name", MAKERS)
def test_drafts_change_no_answer(
    runner: ModelRunner, plain: Callable[[int], Transcript], name: str, max_drafts: int, count: int
) -> None:
    expected = plain(count)
    assert answers(run(runner, MAKERS[name](expected), max_drafts, count)) == answers(expected)


@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("name", ["oracle", "random"])
def test_drafts_change_no_answer_of_preempted_requests(
    directory: Path, plain: Callable[[int], Transcript], name: str, mode: PreemptionMode
) -> None:
    expected = plain(NUM_REQUESTS)
    small = make_runner(directory, num_blocks=48, block_size=8, num_host_blocks=64)
    engine = make_engine(
        small, drafting=drafting_by(MAKERS[name](expected), 3, max_samples=MAX_SAMPLES), preemption_mode=mode, **ROOMY
    )
    transcript = run_engine_to_end(engine, mixed_requests())
    assert answers(transcript) == answers(expected)
    assert sum(engine.stats().counters.preemptions.values()) > 0


def test_oracle_gives_several_tokens_per_step(directory: Path) -> None:
    runner = make_runner(directory, num_blocks=512, block_size=16)
    request = make_request([5, 6, 7, 8], "a", max_tokens=41, ignore_eos=True)
    steps = []
    known = run_engine_to_end(make_engine(runner, **ROOMY), [request])
    for proposer in (None, oracle(known)):
        engine = make_engine(
            runner, drafting=drafting_by(proposer, 3, max_samples=MAX_SAMPLES) if proposer else None, **ROOMY
        )
        assert run_engine_to_end(engine, [request]).tokens == known.tokens
        steps.append(engine.stats().counters.steps)
    assert steps == [41, 11]  # the prompt, then 40 tokens by one or by four


def test_log_probabilities_are_those_of_one_token_per_step(directory: Path) -> None:
    runner = make_runner(directory, num_blocks=512, block_size=16)
    request = make_request([5, 6, 7, 8], "a", max_tokens=12, ignore_eos=True, logprobs=3, repetition_penalty=1.2)

    def logprobs(proposer: Proposer | None) -> list[Any]:
        engine = make_engine(
            runner, drafting=drafting_by(proposer, 3, max_samples=MAX_SAMPLES) if proposer else None, **ROOMY
        )
        engine.add_request(request)
        events = []
        while engine.has_work:
            events += engine.step()
        return [one for event in events for one in getattr(event, "logprobs", None) or []]

    plain = logprobs(None)
    known = run_engine_to_end(make_engine(runner, **ROOMY), [request])
    assert len(plain) == 12 and logprobs(oracle(known)) == plain
