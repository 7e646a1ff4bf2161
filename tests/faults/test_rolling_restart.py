"""An upgrade: every part is stopped and restarted in order while clients stream. Clients see at most a 503."""

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


async def test_rolling_restart_under_load_fails_no_client(demo_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    mix = RequestMix(random.Random(SEED), tokenizer, MODEL, max_tokens=60)
    flags = ["--script-step-seconds", "0.02"]
    async with running_site(tmp_path, demo_model_dir, num_workers=2, worker_flags=flags) as site:
        clients = [Progress() for _ in range(NUM_CLIENTS)]
        rolled = asyncio.create_task(roll(site, clients))
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            stream_client = StreamClient(session, site.urls, random.Random(SEED))
            await asyncio.gather(*(be_client(stream_client, mix, rolled, client) for client in clients))
        await rolled
        # SIGTERM loses no stream: gateways finish theirs, workers finish or hand back, the store reads its file.
        assert ": fenced" not in site.fleet.all_logs() and "reaped worker" not in site.fleet.all_logs()
        await site.nothing_is_left()


class Progress:
    """Answers that one client has had, so that the restart continues only while every client is served."""

    def __init__(self) -> None:
        self.num_answers = 0
        self.answered = asyncio.Condition()

    async def count(self) -> None:
        async with self.answered:
            self.num_answers += 1
            self.answered.notify_all()

    async def one_asked_for_and_answered(self) -> None:
        """Wait for two more answers, because the first may belong to a request from before."""
        async with self.answered:
            enough = self.num_answers + 2
            await self.answered.wait_for(lambda: self.num_answers >= enough)


async def be_client(client: StreamClient, mix: RequestMix, rolled: "asyncio.Task[None]", progress: Progress) -> None:
    while not rolled.done():
        request = mix.draw()
        answer = await client.complete(request.body)
        assert request.difference(answer) == ""
        await progress.count()


async def roll(site: Site, clients: list[Progress]) -> None:
    for name in list(site.ports):
        assert await site.end(name) == 0
        site.start_gateway(name)
        await site.ready(num_workers=2)
        await served(clients)
    for name in site.worker_names:
        assert await site.end(name) == 0
        site.start_worker()
        await site.ready(num_workers=1)
        await served(clients)
    await asyncio.to_thread(site.store.stop)
    await asyncio.to_thread(site.store.start)
    await site.ready(num_workers=2)
    await served(clients)


async def served(clients: list[Progress]) -> None:
    """Wait until every client has sent a request and got its answer since."""
    await asyncio.gather(*(client.one_asked_for_and_answered() for client in clients))
