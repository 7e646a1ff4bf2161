"""kill -9 of a worker in the middle of eight greedy streams: every client gets the text of the undisturbed run."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from tokenizers import Tokenizer

from shared.redis_keys import GROUP, RedisKeys
from tests.conftest import Valkey
from tests.e2e.fleet import MODEL, Answer, Api, Fleet, connected, running_fleet
from tests.engine_worker.execution.draft_heads import write_head
from tests.engine_worker.execution.mtp_heads import write_mtp
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 64
WORDS = {"guided_regex": "([A-Z][a-z]+ ){200}"}  # the new owner advances the grammar over the journal's tokens
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "The three primary colors are",
    "In the year 1969,",
    "def fibonacci(n):",
    "The best thing about the mountains in winter is",
    "My grandmother's recipe begins with",
]


ASKED: list[tuple[str, dict[str, Any]]] = [
    (prompt, WORDS if number < 2 else {"ignore_eos": True}) for number, prompt in enumerate(PROMPTS)
]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "min_gain": 0}
FREQUENT_TOKENS = tuple(range(25, 600))  # of the demo model, so that some drafts are right


@pytest.mark.parametrize(
    "of_first", ["plain", *(pytest.param(name, marks=pytest.mark.long) for name in ("ngram", "eagle3"))]
)
async def test_second_worker_takes_over_streams(
    valkey: Valkey, demo_model_dir: Path, tmp_path: Path, of_first: str
) -> None:
    """A worker that drafts and one that does not give the same tokens, so each can continue the other's streams."""
    config: dict[str, Any] = DRAFTS
    if of_first == "eagle3":
        head = write_head(tmp_path / "head", demo_model_dir, tokens=FREQUENT_TOKENS)
        config = {"method": "eagle3", "model": str(head), "min_gain": 0}
    await take_over(valkey, demo_model_dir, tmp_path / "logs", config if of_first != "plain" else None)


@pytest.mark.long
async def test_second_worker_takes_over_streams_of_a_hybrid(valkey: Valkey, tmp_path: Path) -> None:
    """One worker drafts by multi-token prediction; a token is one of two, so that some drafts are right."""
    model = write_tiny_model(tmp_path / "hybrid")
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode("ab", add_special_tokens=False).ids
    assert len(tokens) == 2
    case = NATIVE["qwen3_5_text"]
    write_family(model, replace(case, changes=case.changes | {"vocab_size": VOCAB_SIZE, "head_dim": 32}))
    write_mtp(model, (tokens[0], tokens[1]))
    options = {"ignore_eos": True, "allowed_token_ids": tokens, "temperature": 1.0}
    asked = [(prompt, {**options, "seed": number}) for number, prompt in enumerate(PROMPTS)]
    await take_over(valkey, model, tmp_path / "logs", {"method": "mtp", "min_gain": 0}, asked, num_tokens=600)


async def take_over(
    valkey: Valkey,
    model: Path,
    logs: Path,
    of_first: dict[str, Any] | None,
    asked: Sequence[tuple[str, dict[str, Any]]] = ASKED,
    num_tokens: int = NUM_TOKENS,
) -> None:
    """Kill one of two workers in the middle of answers; the first has `of_first` as its --speculative-config."""
    with running_fleet(logs) as fleet:
        common = ["--model", str(model), "--served-model-name", MODEL, "--redis-url", valkey.url]
        fleet.start("gateway", "-m", "gateway", *common, "--port", str(fleet.port))
        for name in ("worker-a", "worker-b"):
            options = ["--dtype", "float32", "--num-threads", "1", "--kv-cache-memory-bytes", "128M"]
            options += ["--max-model-len", "1024", "--metrics-port", "0", "--worker-id", name]
            if name == "worker-a" and of_first is not None:
                options += ["--speculative-config", json.dumps(of_first)]
            fleet.start(name, "-m", "engine_worker", *common, *options)
        async with connected(f"http://127.0.0.1:{fleet.port}") as api:
            await api.wait_until_ready(fleet, num_workers=2)
            await kill_in_the_middle(api, lambda: kill_the_busiest(fleet, valkey), num_tokens, asked)


async def kill_in_the_middle(
    api: Api,
    kill: Callable[[], None],
    num_tokens: int = NUM_TOKENS,
    asked: Sequence[tuple[str, dict[str, Any]]] = ASKED,
) -> None:
    undisturbed = await asyncio.gather(
        *(api.complete(Answer(), prompt, num_tokens, **options) for prompt, options in asked)
    )
    answers = [Answer() for _ in asked]
    streams = [
        asyncio.create_task(api.complete(answer, prompt, num_tokens, **options))
        for answer, (prompt, options) in zip(answers, asked, strict=True)
    ]
    # Early, because on a busy machine one of two workers may be far ahead of the other.
    while min(len(answer.pieces) for answer in answers) < 4:
        await asyncio.sleep(0.01)
    assert not any(answer.is_over for answer in answers)
    kill()
    await asyncio.gather(*streams)
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.text == expected.text
        assert answer.finish_reasons == ["length"]
        assert answer.completion_tokens == num_tokens
    constrained = [answer for answer, (_, options) in zip(answers, asked, strict=True) if options is WORDS]
    assert all(re.fullmatch("([A-Z][a-z]* ?)+", answer.text) for answer in constrained)
    longest = max(gap for answer in answers for gap in answer.gaps_seconds())
    print(f"longest silence of a stream: {longest:.1f} s")


def kill_the_busiest(fleet: Fleet, valkey: Valkey) -> None:
    """Kill the one of two workers that holds more of the streams."""
    with redis.Redis(unix_socket_path=valkey.socket_path) as client:
        queue = RedisKeys(MODEL).queue("interactive")
        held = {consumer["name"].decode(): consumer["pending"] for consumer in client.xinfo_consumers(queue, GROUP)}
    # Each request is held, or has ended in the store while its client still reads.
    assert len(PROMPTS) // 2 < sum(held.values()) <= len(PROMPTS)
    busiest = max(held, key=lambda worker_id: held[worker_id])
    print(f"killing {busiest} of {held}")
    fleet.processes[busiest.split(".")[0]].kill()
