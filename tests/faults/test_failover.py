"""The store fails over under streams: killed, demoted, without its replica, or with a proxy that closes connections.

Two real gateways and three workers on a fake model. Every stream is complete, and no process ends.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from tests.faults.mixed_requests import MixedRequest, RequestMix
from tests.faults.site import MODEL, Site, running_site
from tests.faults.store_site import StoreSite, has_haproxy, running_store_site
from tests.faults.stream_client import Answer, StreamClient, empty_answer

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_haproxy(), reason="apt-get install haproxy"),
]
SEED = 31
NUM_STREAMS = 30
NUM_WORKERS = 3
STEP_SECONDS = 0.05
WORKER_FLAGS = ["--script-step-seconds", str(STEP_SECONDS)]
MAX_SILENCE_SECONDS = 5.0
MAX_DEMOTION_SILENCE_SECONDS = 4.0
MAX_SPLIT_SILENCE_SECONDS = 15.0


class Streams:
    """Streams over all gateways, each with the text that an undisturbed server gives."""

    def __init__(self, site: Site, client: StreamClient, requests: list[MixedRequest]) -> None:
        self._site = site
        self._requests = requests
        self._answers = [empty_answer(request.body) for request in requests]
        self._tasks = [
            asyncio.create_task(client.complete(request.body, answer))
            for request, answer in zip(requests, self._answers, strict=True)
        ]

    async def have_begun(self) -> None:
        async with asyncio.timeout(60):
            while not all(any(answer.texts) for answer in self._answers):
                await asyncio.sleep(0.02)

    async def are_whole(self, max_silence_seconds: float) -> None:
        """Return whether all streams are complete, none broke, and no process has ended."""
        try:
            async with asyncio.timeout(120):
                answers: list[Answer] = await asyncio.gather(*self._tasks)
            differences = [one.difference(answer) for one, answer in zip(self._requests, answers, strict=True)]
            assert differences == [""] * len(answers)
            silences = sorted(answer.longest_silence_seconds for answer in answers)
            print(f"silent for at most {silences[-1]:.1f} s, {silences[len(silences) // 2]:.1f} s in the middle")
            assert silences[-1] <= max_silence_seconds, silences
            assert sum(answer.num_resumes for answer in answers) == 0
            assert not self._site.fleet.has_lost_one()
        except (AssertionError, TimeoutError):
            print(self._site.fleet.all_logs())
            raise


Start = Callable[[Site], Awaitable[Streams]]


@pytest.fixture
async def start_streams(demo_model_dir: Path) -> AsyncIterator[Start]:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    mix = RequestMix(random.Random(SEED), tokenizer, MODEL, max_tokens=260)
    source = random.Random(SEED)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def start(site: Site) -> Streams:
            client = StreamClient(session, site.urls, source)
            streams = Streams(site, client, [mix.draw() for _ in range(NUM_STREAMS)])
            await streams.have_begun()
            return streams

        yield start


@asynccontextmanager
async def site_of(
    store: StoreSite, directory: Path, model: Path, step_seconds: float = STEP_SECONDS
) -> AsyncIterator[Site]:
    directory.mkdir()
    options = {
        "num_workers": NUM_WORKERS,
        "worker_flags": ["--script-step-seconds", str(step_seconds)],
        "store_url": store.url,
    }
    async with running_site(directory, model, **options) as site:  # type: ignore[arg-type]
        yield site


async def test_planned_demotion_ends_no_worker(demo_model_dir: Path, tmp_path: Path, start_streams: Start) -> None:
    with running_store_site(tmp_path / "stores") as store:
        async with site_of(store, tmp_path / "site", demo_model_dir, step_seconds=0.03) as site:
            streams = await start_streams(site)
            await demote(store)
            await streams.are_whole(MAX_DEMOTION_SILENCE_SECONDS)


@pytest.mark.long
async def test_planned_demotion_ends_no_idle_worker(demo_model_dir: Path, tmp_path: Path, start_streams: Start) -> None:
    """Blocking reads of idle workers end with UNBLOCKED."""
    with running_store_site(tmp_path / "stores") as store:
        async with site_of(store, tmp_path / "site", demo_model_dir) as site:
            for _ in range(3):
                await demote(store)
                await asyncio.to_thread(store.wait_until_whole)
            assert not site.fleet.has_lost_one(), site.fleet.all_logs()
            streams = await start_streams(site)
            await streams.are_whole(MAX_SILENCE_SECONDS)


async def demote(store: StoreSite) -> None:
    primary = store.primary
    await asyncio.to_thread(store.fail_over)
    await asyncio.to_thread(store.wait_until_primary_is_not, primary)


@pytest.mark.long
async def test_two_primaries_lose_nothing(demo_model_dir: Path, tmp_path: Path, start_streams: Start) -> None:
    """After a demotion without coordination, haproxy leads to both for 10 s, and the old one's writes are lost."""
    with running_store_site(tmp_path / "stores") as store:
        async with site_of(store, tmp_path / "site", demo_model_dir) as site:
            streams = await start_streams(site)
            await asyncio.to_thread(partial(store.fail_over, is_coordinated=False))
            await streams.are_whole(MAX_SPLIT_SILENCE_SECONDS)


@pytest.mark.long
async def test_killed_primary_five_times_loses_nothing(
    demo_model_dir: Path, tmp_path: Path, start_streams: Start
) -> None:
    with running_store_site(tmp_path / "stores") as store:
        async with site_of(store, tmp_path / "site", demo_model_dir) as site:
            for _ in range(5):
                streams = await start_streams(site)
                killed = await asyncio.to_thread(store.kill_primary)
                await streams.are_whole(MAX_SILENCE_SECONDS)
                store.start_server(killed, replica_of=store.primary)
                await asyncio.to_thread(store.wait_until_whole)


@pytest.mark.long
async def test_missing_replica_ends_no_worker(demo_model_dir: Path, tmp_path: Path, start_streams: Start) -> None:
    """NOREPLICAS: the primary accepts no write until the replica continues."""
    with running_store_site(tmp_path / "stores", min_replicas_to_write=1) as store:
        async with site_of(store, tmp_path / "site", demo_model_dir) as site:
            streams = await start_streams(site)
            replica = store.servers[store.replica]
            os.kill(replica.pid, signal.SIGSTOP)
            await asyncio.sleep(9)  # length of the fault
            os.kill(replica.pid, signal.SIGCONT)
            await streams.are_whole(9 + 2.0)


@pytest.mark.long
async def test_proxy_that_closes_for_four_seconds_loses_nothing(
    demo_model_dir: Path, tmp_path: Path, start_streams: Start
) -> None:
    options = {"num_workers": NUM_WORKERS, "worker_flags": WORKER_FLAGS, "are_gateways_behind_proxies": True}
    async with running_site(tmp_path, demo_model_dir, **options) as site:  # type: ignore[arg-type]
        streams = await start_streams(site)
        await site.cut_from_store(4)
        await streams.are_whole(4 + 2.0)
