"""A gateway is paused or gone: its clients continue at another one, and requests without a reader end."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from tests.faults.mixed_requests import MixedRequest, RequestMix
from tests.faults.site import MODEL, Site, running_site
from tests.faults.stream_client import Answer, StreamClient, empty_answer

pytestmark = pytest.mark.timeout(600)
SEED = 21
PATIENCE_SECONDS = 60.0
SILENCE_SECONDS = 1.0  # silence after which a client gives up a connection
GRACE_SECONDS = 2


@pytest.fixture
async def site(demo_model_dir: Path, tmp_path: Path) -> AsyncIterator[Site]:
    flags = ["--script-step-seconds", "0.02"]
    async with running_site(tmp_path, demo_model_dir, num_workers=1, worker_flags=flags) as site:
        yield site


def session(silence_seconds: float | None) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=silence_seconds)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def until_all_have(answers: list[Answer], num_chars: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while min(len(text) for answer in answers for text in answer.texts) < num_chars:
            await asyncio.sleep(0.01)


async def test_streams_of_a_paused_gateway_resume_or_end_correctly(site: Site, demo_model_dir: Path) -> None:
    """Some clients resume at the other gateway; others wait, and get the rest when it wakes."""
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    mix = RequestMix(random.Random(SEED), tokenizer, MODEL, max_tokens=300)
    requests: list[MixedRequest] = [mix.draw() for _ in range(8)]
    answers = [empty_answer(request.body) for request in requests]
    async with session(SILENCE_SECONDS) as hasty, session(None) as patient:
        source = random.Random(SEED)
        clients = [StreamClient(hasty, site.urls, source), StreamClient(patient, site.urls[:1], source)]
        streams = [
            asyncio.create_task(clients[number % 2].complete(request.body, answer))
            for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
        ]
        await until_all_have(answers, 10)
        gateway = site.fleet.processes["g0"]
        gateway.send_signal(signal.SIGSTOP)
        await asyncio.gather(*streams[::2])  # the clients that do not wait
        assert sum(answer.num_resumes for answer in answers[::2]) > 0
        print(f"longest silence: {max(answer.longest_silence_seconds for answer in answers[::2]):.1f} s")
        assert not any(stream.done() for stream in streams[1::2])
        gateway.send_signal(signal.SIGCONT)
        await asyncio.gather(*streams[1::2])
    differences = [request.difference(answer) for request, answer in zip(requests, answers, strict=True)]
    assert differences == [""] * len(requests)
    assert sum(answer.num_resumes for answer in answers[1::2]) == 0
    await site.nothing_is_left()


async def test_requests_of_a_killed_gateway_end_without_a_reader(site: Site) -> None:
    """The worker ends them long before their last token; the other gateway's requests continue."""
    async with session(None) as http:
        begun = [await http.post(f"{site.urls[0]}/v1/completions", json=endless()) for _ in range(3)]
        other = await http.post(f"{site.urls[1]}/v1/completions", json=endless())
        assert [reply.status for reply in (*begun, other)] == [200] * 4
        shorten_grace(site)
        await site.end("g0", signal.SIGKILL)
        killed_at = time.monotonic()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while site.fleet.log("w0").count("ended: its gateway") < 3:
                await asyncio.sleep(0.05)
        print(f"ended {time.monotonic() - killed_at:.1f} s after the kill, with a grace of {GRACE_SECONDS} s")
        assert await other.content.readany()  # its tokens are still published
        for reply in (*begun, other):
            reply.close()
        await site.nothing_is_left()
    assert site.fleet.log("w0").count("ended: its gateway") == 3


def endless() -> dict[str, Any]:
    return {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1900, "ignore_eos": True, "stream": True}


def shorten_grace(site: Site) -> None:
    """Shorten the grace period, which is a minute for a request without detach_seconds."""
    with site.store.client() as client:
        for key in client.scan_iter(match=f"{site.keys.request('*')}"):
            assert client.hget(key, "grace") == b"60"
            client.hset(key, "grace", GRACE_SECONDS)
