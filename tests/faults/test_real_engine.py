"""SmolLM2 in the whole system: gateway, store and worker are killed in turn, and every client's text is unchanged."""

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.faults.site import MODEL, Site, running_site
from tests.faults.stream_client import Answer, StreamClient, empty_answer

pytestmark = pytest.mark.timeout(900)
SEED = 7
PATIENCE_SECONDS = 120.0
NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "My grandmother's recipe begins with",
]
# Float32, in which the KV recomputed by a new owner gives the same tokens.
WORKER_FLAGS = ["--dtype", "float32", "--num-threads", "1", "--kv-cache-memory-bytes", "64M"]
WORKER_FLAGS += ["--max-model-len", "512", "--max-num-seqs", "4", "--dead-after", "3"]


async def test_kill_of_each_part_changes_no_text(demo_model_dir: Path, tmp_path: Path) -> None:
    program = ["-m", "engine_worker", "--model", str(demo_model_dir)]
    options: dict[str, Any] = {"worker_flags": WORKER_FLAGS, "worker_program": program}
    bodies = [body(prompt, **({} if number else {"temperature": 0.8})) for number, prompt in enumerate(PROMPTS)]
    async with running_site(tmp_path, demo_model_dir, num_workers=1, **options) as site:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
            client = StreamClient(session, site.urls, random.Random(SEED))
            undisturbed = await asyncio.gather(*(client.complete(each) for each in bodies))
            answers = [empty_answer(each) for each in bodies]
            streams = asyncio.gather(*(client.complete(*each) for each in zip(bodies, answers, strict=True)))
            await kill_in_turn(site, answers)
            await streams
        assert [answer.texts for answer in answers] == [answer.texts for answer in undisturbed]
        assert [answer.finish_reasons for answer in answers] == [["length"]] * len(answers)
        assert [answer.num_ends for answer in answers] == [1] * len(answers)
        print(f"longest silence: {max(answer.longest_silence_seconds for answer in answers):.1f} s")
        await site.nothing_is_left()


def body(prompt: str, **sampling: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "seed": SEED}
    return {**asked, "ignore_eos": True, **sampling}


async def kill_in_turn(site: Site, answers: list[Answer]) -> None:
    await until_one_has_more(answers)
    await site.end("g0", signal.SIGKILL)
    site.start_gateway("g0")
    await until_one_has_more(answers)
    await asyncio.to_thread(site.store.kill)
    await asyncio.to_thread(site.store.start)
    await until_one_has_more(answers)
    await site.end("w0", signal.SIGKILL)
    site.start_worker()


async def until_one_has_more(answers: list[Answer]) -> None:
    """Wait until an unfinished stream has new text, so that a kill is in the middle of one."""
    before = [len(answer.texts[0]) for answer in answers]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not any(
            not answer.num_ends and len(answer.texts[0]) > length
            for answer, length in zip(answers, before, strict=True)
        ):
            assert not all(answer.num_ends for answer in answers), "all have ended before the last kill"
            await asyncio.sleep(0.01)
