"""32 streams of mixed length share one worker: new requests join the running batch, and long prompts block none."""

import asyncio
from collections.abc import AsyncIterator
from statistics import median

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.clients.conftest import Served
from tests.e2e.fleet import Answer, Api, connected

pytestmark = pytest.mark.timeout(900)

NUM_STREAMS = 32
LONG_PROMPT_TOKENS = 1500


@pytest.fixture
async def api(served: Served) -> AsyncIterator[Api]:
    async with connected(served.url) as api:
        yield api


def prompt(num_tokens: int, first: int = 1000) -> list[int]:
    return [first + (7 * position) % 5000 for position in range(num_tokens)]


async def worker_metrics(port: int) -> dict[str, float]:
    """Return worker metrics by sample name, summed over all labels."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as reply:
        text = await reply.text()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def test_streams_of_mixed_length_all_finish(api: Api, served: Served) -> None:
    before = await worker_metrics(served.metrics_port)
    # prompts of 5..98 tokens, outputs of 8..39
    lengths = [(5 + 3 * number, 8 + number) for number in range(NUM_STREAMS)]
    streams = [
        api.complete(Answer(), prompt(num_prompt, first=1000 + num_prompt), num_output, ignore_eos=True)
        for num_prompt, num_output in lengths
    ]
    answers = await asyncio.gather(*streams)
    assert [answer.completion_tokens for answer in answers] == [num_output for _, num_output in lengths]
    assert all(answer.finish_reasons == ["length"] for answer in answers)
    after = await worker_metrics(served.metrics_port)
    num_tokens = sum(num_output for _, num_output in lengths)
    assert after["pagestream_generation_tokens_total"] - before["pagestream_generation_tokens_total"] == num_tokens
    num_steps = after["pagestream_step_batch_tokens_count"] - before["pagestream_step_batch_tokens_count"]
    # One by one they would take a step per token. Together: the longest output plus the prompt chunks.
    assert num_steps < num_tokens / 4
    print(f"{num_tokens} tokens of {NUM_STREAMS} streams in {num_steps:.0f} steps")


async def test_long_prefill_does_not_pause_streams(api: Api) -> None:
    running = [Answer() for _ in range(4)]
    tasks = [
        asyncio.create_task(api.complete(answer, prompt(20, first=2000 + 100 * number), 96, ignore_eos=True))
        for number, answer in enumerate(running)
    ]
    while min(len(answer.pieces) for answer in running) < 10:
        await asyncio.sleep(0.005)
    first_piece = [len(answer.pieces) for answer in running]
    newcomer = await api.complete(Answer(), prompt(LONG_PROMPT_TOKENS), 1, ignore_eos=True)
    during = [answer.pieces[start:] for answer, start in zip(running, first_piece, strict=True)]
    assert newcomer.completion_tokens == 1
    # The prefill takes six steps of 256 tokens; each of them also decodes every running stream.
    assert min(len(pieces) for pieces in during) >= LONG_PROMPT_TOKENS // 256
    assert not any(answer.is_over for answer in running)
    await asyncio.gather(*tasks)
    gaps = [gap for answer in running for gap in answer.gaps_seconds()]
    print(f"prefill of {LONG_PROMPT_TOKENS} tokens: longest gap {max(gaps):.3f} s, median {median(gaps):.3f} s")
