"""The page and its event stream: complete, self-contained, and active only while somebody watches."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.store.kv_watch import KVWatch, snapshots_of
from gateway.store.stream_table import DeliveryCounts
from shared.kv_snapshot import WATCH_SECONDS, KVRequest, KVSnapshot
from shared.messages import encode
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.tasks import cancel_and_wait
from tests.gateway.conftest import Gateway
from tests.patience import PATIENCE_SECONDS

UI = Path(__file__).parents[2] / "gateway" / "ui"
VENDOR = UI / "vendor"


def snapshot(worker: str = "w") -> KVSnapshot:
    request = KVRequest(id="r", state="running", num_tokens=20, num_computed_tokens=19, blocks=[1, 2])
    return KVSnapshot(worker=worker, block_size=16, states="pasf", requests=[request], events=[])


async def test_page_and_all_its_files_are_served(gateway: Gateway) -> None:
    async with gateway.session.get("/") as response:
        assert response.status == 200
        policy = response.headers["Content-Security-Policy"]
        page = await response.text()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    named = set(re.findall(r'(?:src|href)="(ui/[^"]+)"', page))
    sources = {path.name: path.read_text() for path in UI.glob("*.js")}
    named |= {f"ui/{name}" for text in sources.values() for name in re.findall(r'(?:from|import) "\./([^"]+)"', text)}
    assert {path.name for path in UI.glob("*.*")} - {"index.html"} == {
        name[3:] for name in named if "vendor" not in name
    }
    assert {path.name for path in VENDOR.glob("*.js")} == {name[10:] for name in named if "vendor" in name}
    for name in named:
        async with gateway.session.get(f"/{name}") as response:
            assert response.status == 200, name
            assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_scripts_of_other_projects_are_unchanged_and_small() -> None:
    table = re.findall(r"^\| (\S+\.js) \|.*\| ([0-9a-f]{64}) \|$", (VENDOR / "README.md").read_text(), re.M)
    assert dict(table) == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.glob("*.js")}
    assert sum(path.stat().st_size for path in VENDOR.glob("*.js")) <= 220_000


@pytest.mark.parametrize(("ui_history", "attribute"), [(True, "on"), (False, "off")])
async def test_page_says_whether_it_may_keep_conversations(
    start_gateway: Callable[..., Any], ui_history: bool, attribute: str
) -> None:
    gateway = await start_gateway(ui_history=ui_history)
    async with gateway.session.get("/") as response:
        assert f'data-history="{attribute}"' in await response.text()


async def test_page_obeys_a_strict_security_policy() -> None:
    """The page has no inline script or style, no foreign resource, and never builds HTML from data."""
    for path in UI.glob("*.*"):
        text = path.read_text()
        assert not re.search(r"https?://|<style|\sstyle=|\son\w+=", text)
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"<script(?![^>]*\ssrc=)", text)


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "..%2Fapp.py", "%2e%2e/app.py", "__init__.py", "vendor/nothing.js", "vendor/README.md", "vendor"],
)
async def test_other_paths_are_not_served(gateway: Gateway, name: str) -> None:
    async with gateway.session.get(f"/ui/{name}") as response:
        assert response.status == 404


async def test_page_is_absent_without_ui(start_gateway: Callable[..., Any]) -> None:
    gateway = await start_gateway(ui=False)
    async with gateway.session.get("/") as response:
        assert response.status == 404


async def test_stream_lasts_as_long_as_its_reader(gateway: Gateway) -> None:
    gateway.engine.kv.snapshots.put_nowait(snapshot())
    async with gateway.session.get("/debug/kv/stream") as response:
        line = await response.content.readline()
        assert json.loads(line.removeprefix(b"data: "))["requests"][0]["blocks"] == [1, 2]
        assert gateway.engine.kv.num_watchers == 1
    async with asyncio.timeout(PATIENCE_SECONDS):
        while gateway.engine.kv.num_watchers:
            await asyncio.sleep(0.01)


class TestWatch:
    @pytest.fixture
    async def watch(self, connections: RedisConnections, keys: RedisKeys) -> AsyncIterator[KVWatch]:
        watch = KVWatch(connections, keys, DeliveryCounts())
        running = asyncio.create_task(watch.run())
        yield watch
        await cancel_and_wait([running])

    async def test_snapshots_are_requested_while_somebody_watches(
        self, watch: KVWatch, connections: RedisConnections, keys: RedisKeys
    ) -> None:
        redis = connections.commands
        assert not await redis.exists(keys.kv_watch)
        async with snapshots_of([watch]) as first, snapshots_of([watch]) as second:
            while not (await redis.pubsub_numsub(keys.kv_channel))[0][1]:
                await asyncio.sleep(0.01)
            assert 0 < await redis.ttl(keys.kv_watch) <= WATCH_SECONDS
            await redis.publish(keys.kv_channel, b"no snapshot")
            await redis.publish(keys.kv_channel, encode(snapshot()))
            assert await anext(first) == await anext(second) == snapshot()
        assert (await redis.pubsub_numsub(keys.kv_channel))[0][1] == 0

    async def test_slow_watcher_misses_the_oldest_snapshots(
        self, watch: KVWatch, connections: RedisConnections, keys: RedisKeys
    ) -> None:
        async with snapshots_of([watch]) as slow, snapshots_of([watch]) as quick:
            while not (await connections.commands.pubsub_numsub(keys.kv_channel))[0][1]:
                await asyncio.sleep(0.01)
            for number in range(20):
                await connections.commands.publish(keys.kv_channel, encode(snapshot(f"w{number}")))
                assert (await anext(quick)).worker == f"w{number}"
            assert (await anext(slow)).worker == "w12"
