"""Every fault of the store and the network, with real gateways that reach the store through a proxy."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from tests.faults.mixed_requests import RequestMix
from tests.faults.site import MODEL, Site, running_site
from tests.faults.stream_client import StreamClient, empty_answer

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
SEED = 12
NUM_STREAMS = 8
WORKER_FLAGS = ["--script-step-seconds", "0.02"]


@pytest.fixture
async def site(demo_model_dir: Path, tmp_path: Path) -> AsyncIterator[Site]:
    options = {"num_workers": 2, "worker_flags": WORKER_FLAGS, "are_gateways_behind_proxies": True}
    async with running_site(tmp_path, demo_model_dir, **options) as site:  # type: ignore[arg-type]
        yield site


async def killed_and_restarted_with_its_file(site: Site) -> None:
    site.store.kill()
    await asyncio.sleep(2)  # length of the fault
    await asyncio.to_thread(site.store.start)


async def restarted_empty(site: Site) -> None:
    site.store.kill()
    site.store.append_only = False
    await asyncio.to_thread(site.store.start)


async def flushed(site: Site) -> None:
    with site.store.client() as client:
        client.flushall()


async def listeners_dropped_again_and_again(site: Site) -> None:
    with site.store.client() as client:
        for _ in range(15):
            client.client_kill_filter(_type="pubsub")
            await asyncio.sleep(0.2)  # interval between faults


async def out_of_memory_and_relieved(site: Site) -> None:
    with site.store.client() as client:
        client.config_set("maxmemory", "1")
        await asyncio.sleep(1.5)  # length of the fault
        client.config_set("maxmemory", "0")


async def connections_reset(site: Site) -> None:
    for _ in range(5):
        for proxy in site.proxies.values():
            proxy.cut()
        await asyncio.sleep(0.1)  # interval between faults


async def down_for_three_seconds(site: Site) -> None:
    await site.cut_from_store(3)


async def replies_lost(site: Site) -> None:
    for _ in range(8):
        for proxy in site.proxies.values():
            proxy.swallow_replies(1)
        await asyncio.sleep(0.1)  # interval between faults


async def replies_late(site: Site) -> None:
    for proxy in site.proxies.values():
        proxy.delay_seconds = 0.5
    await asyncio.sleep(3)  # length of the fault
    for proxy in site.proxies.values():
        proxy.delay_seconds = 0.0


async def half_open_for_twelve_seconds(site: Site) -> None:
    for proxy in site.proxies.values():
        proxy.is_silent = True
    await asyncio.sleep(12)  # longer than a command's timeout and a subscription's ping interval
    for proxy in site.proxies.values():
        proxy.is_silent = False
        proxy.cut()


FAULTS = [
    killed_and_restarted_with_its_file,
    restarted_empty,
    flushed,
    listeners_dropped_again_and_again,
    out_of_memory_and_relieved,
    connections_reset,
    down_for_three_seconds,
    replies_lost,
    replies_late,
    half_open_for_twelve_seconds,
]


@pytest.mark.parametrize("fault", FAULTS)
async def test_fault_behind_a_proxy_changes_no_answer(
    site: Site, demo_model_dir: Path, fault: Callable[[Site], Awaitable[None]]
) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    mix = RequestMix(random.Random(SEED), tokenizer, MODEL, max_tokens=250)
    requests = [mix.draw() for _ in range(NUM_STREAMS)]
    answers = [empty_answer(request.body) for request in requests]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        client = StreamClient(session, site.urls, random.Random(SEED))
        streams = asyncio.gather(
            *(client.complete(request.body, answer) for request, answer in zip(requests, answers, strict=True))
        )
        async with asyncio.timeout(120):
            while not all(any(answer.texts) for answer in answers):
                await asyncio.sleep(0.02)
            await fault(site)
            await streams
    assert [request.difference(answer) for request, answer in zip(requests, answers, strict=True)] == [""] * NUM_STREAMS
    assert not site.fleet.has_lost_one(), site.fleet.all_logs()
    await site.nothing_is_left()


MAX_CUT_OFF_SECONDS = 15.0


async def test_gateway_that_is_cut_off_closes_kept_streams(site: Site, demo_model_dir: Path) -> None:
    """Bytes between one gateway and the store are dropped, connections stay: clients continue at the other one."""
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    request = RequestMix(random.Random(SEED), tokenizer, MODEL, max_tokens=250).draw()
    answer = empty_answer(request.body)
    cut_off, other = site.ports
    urls = [f"http://127.0.0.1:{site.ports[cut_off]}"]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        stream = asyncio.create_task(StreamClient(session, urls, random.Random(SEED)).complete(request.body, answer))
        async with asyncio.timeout(120):
            while not any(answer.texts):
                await asyncio.sleep(0.02)
            urls[0] = f"http://127.0.0.1:{site.ports[other]}"
            site.proxies[cut_off].is_silent = True
            await stream
    assert request.difference(answer) == ""
    assert answer.num_resumes == 1 and answer.longest_silence_seconds <= MAX_CUT_OFF_SECONDS
    assert not site.fleet.has_lost_one(), site.fleet.all_logs()
