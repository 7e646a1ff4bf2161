"""kill -9 of a worker in the middle of eight greedy streams: every client gets the text of the undisturbed run."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from shared.redis_keys import GROUP, RedisKeys
from tests.conftest import Valkey
from tests.e2e.fleet import MODEL, Answer, Api, Fleet, connected, running_fleet
from tests.engine_worker.execution.draft_heads import write_head

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


DRAFTS = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "min_gain": 0}
FREQUENT_TOKENS = tuple(range(25, 600))  # of the demo model, so that some drafts are right


@pytest.mark.parametrize("of_first", ["plain", "ngram", "eagle3"])
async def test_second_worker_takes_over_streams(
    valkey: Valkey, demo_model_dir: Path, tmp_path: Path, of_first: str
) -> None:
    """A worker that drafts and one that does not give the same tokens, so each can continue the other's streams."""
    config = DRAFTS
    if of_first == "eagle3":
        head = write_head(tmp_path / "head", demo_model_dir, tokens=FREQUENT_TOKENS)
        config = {"method": "eagle3", "model": str(head), "min_gain": 0}
    with running_fleet(tmp_path / "logs") as fleet:
        common = ["--model", str(demo_model_dir), "--served-model-name", MODEL, "--redis-url", valkey.url]
        fleet.start("gateway", "-m", "gateway", *common, "--port", str(fleet.port))
        for name in ("worker-a", "worker-b"):
            options = ["--dtype", "float32", "--num-threads", "1", "--kv-cache-memory-bytes", "128M"]
            options += ["--max-model-len", "1024", "--metrics-port", "0", "--worker-id", name]
            if name == "worker-a" and of_first != "plain":
                options += ["--speculative-config", json.dumps(config)]
            fleet.start(name, "-m", "engine_worker", *common, *options)
        async with connected(f"http://127.0.0.1:{fleet.port}") as api:
            await api.wait_until_ready(fleet, num_workers=2)
            await kill_in_the_middle(api, lambda: kill_the_busiest(fleet, valkey))


async def kill_in_the_middle(api: Api, kill: Callable[[], None], num_tokens: int = NUM_TOKENS) -> None:
    asked = [(prompt, WORDS if number < 2 else {"ignore_eos": True}) for number, prompt in enumerate(PROMPTS)]
    undisturbed = await asyncio.gather(
        *(api.complete(Answer(), prompt, num_tokens, **options) for prompt, options in asked)
    )
    answers = [Answer() for _ in PROMPTS]
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
    assert all(re.fullmatch("([A-Z][a-z]* ?)+", answer.text) for answer in answers[:2])
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
