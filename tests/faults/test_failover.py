"""The store fails over under streams: killed, demoted, without its replica, or with a proxy that closes connections.

Two real gateways and three workers on a fake model. Every stream is complete, and no process ends.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.faults.site import Site, running_site
from tests.faults.store_site import StoreSite, has_haproxy, running_store_site
from tests.faults.streams import Start, starting_streams

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_haproxy(), reason="apt-get install haproxy"),
]
NUM_STREAMS = 30
NUM_WORKERS = 3
STEP_SECONDS = 0.05
WORKER_FLAGS = ["--script-step-seconds", str(STEP_SECONDS)]
MAX_SILENCE_SECONDS = 5.0
MAX_DEMOTION_SILENCE_SECONDS = 4.0
MAX_SPLIT_SILENCE_SECONDS = 15.0


@pytest.fixture
async def start_streams(demo_model_dir: Path) -> AsyncIterator[Start]:
    async with starting_streams(demo_model_dir) as start:
        yield start


@asynccontextmanager
async def site_of(
    store: StoreSite, directory: Path, model: Path, step_seconds: float = STEP_SECONDS, *, url: str = ""
) -> AsyncIterator[Site]:
    directory.mkdir()
    options = {
        "num_workers": NUM_WORKERS,
        "worker_flags": ["--script-step-seconds", str(step_seconds)],
        "store_url": url or store.url,
    }
    async with running_site(directory, model, **options) as site:  # type: ignore[arg-type]
        yield site


async def test_planned_demotion_ends_no_worker(demo_model_dir: Path, tmp_path: Path, start_streams: Start) -> None:
    with running_store_site(tmp_path / "stores") as store:
        async with site_of(store, tmp_path / "site", demo_model_dir, step_seconds=0.03) as site:
            streams = await start_streams(site, NUM_STREAMS)
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
            streams = await start_streams(site, NUM_STREAMS)
            await streams.are_whole(MAX_SILENCE_SECONDS)


async def demote(store: StoreSite, *, is_coordinated: bool = True) -> None:
    primary = store.primary
    await asyncio.to_thread(partial(store.fail_over, is_coordinated=is_coordinated))
    await asyncio.to_thread(store.wait_until_primary_is_not, primary)


@pytest.mark.long
async def test_two_primaries_lose_nothing(demo_model_dir: Path, tmp_path: Path, start_streams: Start) -> None:
    """After a demotion without coordination, haproxy leads to both for 10 s, and the old one's writes are lost."""
    with running_store_site(tmp_path / "stores") as store:
        async with site_of(store, tmp_path / "site", demo_model_dir) as site:
            streams = await start_streams(site, NUM_STREAMS)
            await asyncio.to_thread(partial(store.fail_over, is_coordinated=False))
            await streams.are_whole(MAX_SPLIT_SILENCE_SECONDS)


@pytest.mark.long
async def test_killed_primary_five_times_loses_nothing(
    demo_model_dir: Path, tmp_path: Path, start_streams: Start
) -> None:
    with running_store_site(tmp_path / "stores") as store:
        async with site_of(store, tmp_path / "site", demo_model_dir) as site:
            for _ in range(5):
                streams = await start_streams(site, NUM_STREAMS)
                killed = await asyncio.to_thread(store.kill_primary)
                await streams.are_whole(MAX_SILENCE_SECONDS)
                store.start_server(killed, replica_of=store.primary)
                await asyncio.to_thread(store.wait_until_whole)


@pytest.mark.long
async def test_missing_replica_ends_no_worker(demo_model_dir: Path, tmp_path: Path, start_streams: Start) -> None:
    """NOREPLICAS: the primary accepts no write until the replica continues."""
    with running_store_site(tmp_path / "stores", min_replicas_to_write=1) as store:
        async with site_of(store, tmp_path / "site", demo_model_dir) as site:
            streams = await start_streams(site, NUM_STREAMS)
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
        streams = await start_streams(site, NUM_STREAMS)
        await site.cut_from_store(4)
        await streams.are_whole(4 + 2.0)
