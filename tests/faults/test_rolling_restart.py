"""Every part is stopped in order and started again while clients stream: an upgrade. No client sees more than a 503."""

import asyncio
import random
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from tests.faults.mixed_requests import RequestMix
from tests.faults.site import MODEL, Site, running_site
from tests.faults.stream_client import StreamClient

pytestmark = pytest.mark.timeout(600)
SEED = 5
NUM_CLIENTS = 8


async def test_all_parts_one_after_the_other_under_load(demo_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    mix = RequestMix(random.Random(SEED), tokenizer, MODEL, max_tokens=60)
    flags = ["--script-step-seconds", "0.02"]
    async with running_site(tmp_path, demo_model_dir, num_workers=2, worker_flags=flags) as site:
        rolled = asyncio.create_task(roll(site))
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            client = StreamClient(session, site.urls, random.Random(SEED))
            counts = await asyncio.gather(*(be_client(client, mix, rolled) for _ in range(NUM_CLIENTS)))
        await rolled
        assert min(counts) > 3
        # SIGTERM loses no stream: gateways let theirs end, workers finish or hand back, the store comes back with all.
        assert "is fenced" not in site.fleet.all_logs() and "reaped worker" not in site.fleet.all_logs()
        await site.nothing_is_left()


async def be_client(client: StreamClient, mix: RequestMix, rolled: "asyncio.Task[None]") -> int:
    num_answers = 0
    while not rolled.done():
        request = mix.draw()
        answer = await client.complete(request.body)
        assert request.difference(answer) == ""
        num_answers += 1
    return num_answers


async def roll(site: Site) -> None:
    for name in list(site.ports):
        assert await site.end(name) == 0
        site.start_gateway(name)
        await site.ready(num_workers=2)
    for name in site.worker_names:
        assert await site.end(name) == 0
        site.start_worker()
        await site.ready(num_workers=1)
    await asyncio.to_thread(site.store.stop)
    await asyncio.to_thread(site.store.start)
    await site.ready(num_workers=2)
