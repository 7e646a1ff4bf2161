"""The worker's HTTP routes: alive at once, ready in phase READY, and fresh statistics for each scrape."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from engine_worker.health import HealthServer, PortUnavailable
from engine_worker.metrics import WorkerMetrics
from engine_worker.status import WorkerStatus
from tests.builders import make_engine, make_request


class Health:
    def __init__(self) -> None:
        self.status = WorkerStatus("w0", "1")
        self.num_refreshed = 0
        metrics = WorkerMetrics("w0", "m", "1", self.status)
        self.engine = make_engine()
        self.server = HealthServer(self.status, metrics, self._refresh, self)
        self.url = ""

    async def _refresh(self) -> None:
        self.num_refreshed += 1

    async def kv_view(self) -> dict[str, Any]:
        return self.engine.kv_view()

    async def kv_events(self, since: int) -> dict[str, Any]:
        return self.engine.kv_events(since)

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as reply:
            return reply.status, await reply.json()


@pytest.fixture
async def health() -> AsyncIterator[Health]:
    health = Health()
    async with health.server.listen("127.0.0.1", 0) as port:
        health.url = f"http://127.0.0.1:{port}"
        yield health


async def test_readyz_follows_the_phase(health: Health) -> None:
    async with aiohttp.ClientSession() as session:
        health.status.report("load", 0.4, "110 MiB")
        async with session.get(f"{health.url}/readyz") as reply:
            assert reply.status == 503
            expected = {"worker_id": "w0", "phase": "load", "progress": 0.4, "detail": "110 MiB"}
            assert await reply.json() == expected
        async with session.get(f"{health.url}/livez") as reply:
            assert reply.status == 200
        health.status.report("ready", 1.0)
        async with session.get(f"{health.url}/readyz") as reply:
            assert reply.status == 200
        health.status.report("draining", 0.0)
        async with session.get(f"{health.url}/readyz") as reply:
            assert reply.status == 503


async def test_metrics_scrape_refreshes_stats(health: Health) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{health.url}/metrics") as reply:
        assert reply.status == 200
        assert reply.content_type == "text/plain"
        assert "pagestream_worker_up" in await reply.text()
    assert health.num_refreshed == 1


async def test_debug_kv_is_available_after_load(health: Health) -> None:
    assert (await health.get("/debug/kv"))[0] == 503
    health.status.stats = health.engine.stats()
    health.engine.add_request(make_request(6, "a", max_tokens=4, ignore_eos=True))
    health.engine.step()
    status, view = await health.get("/debug/kv")
    (sequence,) = view["sequences"]
    assert (status, view["host"], view["waits_for"], view["device"]["num_blocks"]) == (200, None, "", 64)
    assert view["device"]["states"] == "p" + "aa" + "f" * 62
    assert (sequence["request_id"], sequence["status"], sequence["block_table"]) == ("a", "running", [1, 2])
    assert (sequence["num_tokens"], sequence["num_computed_tokens"], sequence["num_empty_slots"]) == (7, 6, 2)


async def test_debug_kv_events_validates_since(health: Health) -> None:
    health.status.stats = health.engine.stats()
    assert await health.get("/debug/kv/events") == (200, {"events": [], "last": 0, "num_lost": 0})
    for wrong in ("-1", "1.0", "x", "", "9" * 30):
        assert (await health.get(f"/debug/kv/events?since={wrong}"))[0] == 400


async def test_health_server_port_in_use_is_named(health: Health) -> None:
    port = int(health.url.rsplit(":", 1)[1])
    with pytest.raises(PortUnavailable, match=f"--metrics-port {port}"):
        async with Health().server.listen("127.0.0.1", port):
            pass
