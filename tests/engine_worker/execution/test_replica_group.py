"""An engine on two and three ranks gives the same as on one: real followers, gloo, float32."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from engine_worker.execution.load.rank_group import RankGroup
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from shared.messages import (
    EncodedLogprobs,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Pooling,
    TokenEvent,
    decoded_logprobs,
    decoded_vector,
    scores_by_index,
)
from tests.builders import Transcript, make_prompt, make_request
from tests.engine_worker.execution.reference import make_engine, make_runner, write_model_of_words
from tests.idle_seconds import cpu_seconds, least_share
from tests.tiny_model import IM_END

pytestmark = [pytest.mark.tp, pytest.mark.e2e]
BLOCK_SIZE = 8
ROOMY = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
# Runs in followers only: their command line is unique.
TELLS_OF_PICKLE = """
import sys
def watch(event, arguments):
    if event == "pickle.find_class":
        with open({path!r}, "a") as file:
            print(*arguments, file=file)
if "engine_worker.follower" in sys.orig_argv:
    sys.addaudithook(watch)
    print("begins", file=open({path!r}, "a"))
"""
SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 2}
    return write_model_of_words(tmp_path_factory.mktemp("models") / "tiny", **sizes)


def runner_of(model_dir: Path, size: int) -> ModelRunner:
    pool: dict[str, Any] = {"num_blocks": 40, "num_host_blocks": 24, "block_size": BLOCK_SIZE}
    return make_runner(model_dir, **pool, num_threads=1, tensor_parallel_size=size)


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> ModelRunner:
    return runner_of(model_dir, 1)


@pytest.fixture(scope="module")
def unpickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that logs each class that followers unpickle, from their first import to the last test."""
    return tmp_path_factory.mktemp("unpickled") / "names"


@pytest.fixture(scope="module", params=[2, 3])
def group(model_dir: Path, request: pytest.FixtureRequest, unpickled: Path) -> Iterator[ModelRunner]:
    (unpickled.parent / "sitecustomize.py").write_text(TELLS_OF_PICKLE.format(path=str(unpickled)))
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("PYTHONPATH", str(unpickled.parent), prepend=os.pathsep)
        runner = runner_of(model_dir, request.param)
    yield runner
    assert runner.group is not None
    runner.group.close()


@dataclass
class Answers:
    transcript: Transcript
    preemptions: int
    num_prompt_tokens: int  # computed
    logprobs: dict[str, list[EncodedLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, dict[int, EncodedLogprobs]] = field(default_factory=dict)


def answers(runner: ModelRunner, requests: list[GenerationRequest], **config: Any) -> Answers:
    engine = make_engine(runner, **{**ROOMY, **config})
    for request in requests:
        engine.add_request(request)
    found = Answers(Transcript(), 0, 0)
    while engine.has_work:
        events = engine.step()
        engine.check_integrity()
        found.transcript.add(events)
        for event in events:
            if isinstance(event, TokenEvent):
                found.logprobs.setdefault(event.request_id, []).extend(event.logprobs or ())
                scores = scores_by_index(event.prompt_logprobs)
                found.prompt_logprobs.setdefault(event.request_id, {}).update(scores)
    counters = engine.stats().counters
    found.preemptions, found.num_prompt_tokens = sum(counters.preemptions.values()), counters.prompt_tokens_computed
    return found


def requests_of(number: int, **sampling: Any) -> list[GenerationRequest]:
    """Return `number` requests with prompts from one token to several chunks."""
    sizes = (1, 7, 16, 33, 90)
    return [
        make_request([IM_END + 1 + token % 200 for token in make_prompt(size, first=9 * size)], f"r{size}", **sampling)
        for size in sizes[:number]
    ]


GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Grammar(GrammarKind.REGEX, r"\d{3}-[xyz]{2,9}"),
    "choice": Grammar(GrammarKind.CHOICE, '["the end", "of"]'),
}
CASES: dict[str, tuple[list[GenerationRequest], dict[str, Any]]] = {
    "batch": (requests_of(4, max_tokens=24), {}),
    "batch_async": (requests_of(4, max_tokens=24), {"async_scheduling": True}),
    "chunked_prefill": (requests_of(5, max_tokens=8), {"max_num_batched_tokens": 17}),
    "sampling": (requests_of(4, max_tokens=16, temperature=0.9, top_p=0.95, seed=3), {}),
    "parallel_samples": (requests_of(3, max_tokens=12, temperature=0.8, seed=3, n=3), {}),
    "beams": (requests_of(3, max_tokens=10, n=3, use_beam_search=True), {}),
    "penalties": (requests_of(4, max_tokens=16, repetition_penalty=1.3, frequency_penalty=0.4), {}),
    "grammars": (
        [
            make_request(
                [5] * 9, name, max_tokens=40, temperature=1.0, seed=1, grammar=grammar, stop_token_ids=(IM_END,)
            )
            for name, grammar in GRAMMARS.items()
        ],
        {"async_scheduling": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_group_tokens_equal_one_rank(alone: ModelRunner, group: ModelRunner, case: str) -> None:
    requests, config = CASES[case]
    expected, found = (answers(runner, requests, **config).transcript for runner in (alone, group))
    assert found.tokens == expected.tokens and found.others == expected.others and found.ends == expected.ends
    assert all(len(tokens) > 1 for tokens in found.tokens.values())


def test_group_prefix_cache_hits_equal_one_rank(alone: ModelRunner, group: ModelRunner) -> None:
    requests = [make_request([7] * 40 + [token] * 9, f"r{token}", max_tokens=8) for token in range(20, 26)]
    expected, found = (answers(runner, requests, max_num_seqs=2) for runner in (alone, group))
    assert found.transcript.tokens == expected.transcript.tokens
    assert found.num_prompt_tokens == expected.num_prompt_tokens < 6 * 49 - 100


@pytest.mark.parametrize(
    ("mode", "ahead"),
    [(PreemptionMode.SWAP, False), (PreemptionMode.SWAP, True), (PreemptionMode.RECOMPUTE, True)],
)
def test_group_preempted_sequences_equal_one_rank(
    alone: ModelRunner, group: ModelRunner, mode: PreemptionMode, ahead: bool
) -> None:
    requests = [make_request([10 + number] * 30, f"r{number}", max_tokens=40) for number in range(6)]
    config = {"preemption_mode": mode, "async_scheduling": ahead}
    expected, found = (answers(runner, requests, **config) for runner in (alone, group))
    assert found.preemptions > 0
    assert found.transcript.tokens == expected.transcript.tokens


def test_group_logprobs_equal_one_rank(alone: ModelRunner, group: ModelRunner) -> None:
    requests = [
        *requests_of(5, max_tokens=6, logprobs=3, prompt_logprobs=2),
        make_request(11, "plain", max_tokens=6),
    ]
    expected, found = (answers(runner, requests, max_num_batched_tokens=24) for runner in (alone, group))
    assert found.transcript.tokens == expected.transcript.tokens
    assert found.logprobs.keys() == expected.logprobs.keys()
    for name, scores in expected.logprobs.items():
        assert values(found.logprobs[name]) == pytest.approx(values(scores), abs=1e-4)  # fp32, other order of sums
    for name, by_index in expected.prompt_logprobs.items():
        assert found.prompt_logprobs[name].keys() == by_index.keys()
        other = found.prompt_logprobs[name].values()
        assert values(other) == pytest.approx(values(by_index.values()), abs=1e-4)
    assert len(found.prompt_logprobs["r90"]) == 89


def test_group_vectors_equal_one_rank(alone: ModelRunner, group: ModelRunner) -> None:
    vectors = [structs.replace(request, pooling=Pooling()) for request in requests_of(5, max_tokens=1)]
    texts = [make_request(11, "text", max_tokens=6), make_request(20, "scored", max_tokens=3, prompt_logprobs=0)]
    expected, found = (answers(runner, [*texts, *vectors], max_num_batched_tokens=24) for runner in (alone, group))
    assert found.transcript.tokens == expected.transcript.tokens
    for request in vectors:
        ((one,), (other,)) = (of.logprobs[request.request_id] for of in (expected, found))
        of_one, of_other = (np.frombuffer(decoded_vector(vector), "<f4") for vector in (one, other))
        assert len(of_one) == 96 and of_one == pytest.approx(of_other, abs=1e-5)  # fp32, other order of sums


def values(scores: Iterable[EncodedLogprobs]) -> list[float]:
    return [number for score in decoded_logprobs(list(scores)) for number in (score.logprob, *score.top_logprobs)]


def test_followers_have_no_store_and_no_listening_socket(group: ModelRunner) -> None:
    assert isinstance(group.group, RankGroup)
    assert group.group.health().ranks_up == (True,) * (len(group.group.pids) + 1)
    listening = inodes_that_listen()
    for pid in group.group.pids:
        assert not {"redis", "hiredis", "aiohttp", "prometheus_client"} & mapped_names(pid)
        opened = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        assert not opened & listening
        assert any(path.startswith("/memfd:pagestream-steps") for path in opened)


def test_followers_idle_use_at_most_1_percent_of_a_core(group: ModelRunner) -> None:
    assert isinstance(group.group, RankGroup)
    for pid in group.group.pids:
        assert least_share(partial(cpu_seconds, pid), at_most=0.01) <= 0.01


def test_followers_unpickle_nothing(group: ModelRunner, unpickled: Path) -> None:
    """Covers everything that the tests above made them do."""
    answers(group, requests_of(2, max_tokens=4))
    logged = unpickled.read_text().splitlines()
    assert len(logged) >= 1 and set(logged) == {"begins"}


def inodes_that_listen() -> set[str]:
    """Return the inodes in the format of /proc/PID/fd."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}


def mapped_names(pid: int) -> set[str]:
    """Return the path parts of all mapped files; they include the packages of native modules."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {part for line in lines for part in line.split("/")[1:]}
