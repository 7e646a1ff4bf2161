"""The worker's own routes: alive at once, ready only when it claims, fresh figures for each scrape."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from engine_worker.health import HealthServer, PortUnavailable
from engine_worker.metrics import WorkerMetrics
from engine_worker.status import WorkerStatus


class Health:
    def __init__(self) -> None:
        self.status = WorkerStatus("w0", "1")
        self.num_refreshed = 0
        self.server = HealthServer(self.status, WorkerMetrics("w0", "m", "1", self.status), self._refresh)
        self.url = ""

    async def _refresh(self) -> None:
        self.num_refreshed += 1


@pytest.fixture
async def health() -> AsyncIterator[Health]:
    health = Health()
    async with health.server.listen("127.0.0.1", 0) as port:
        health.url = f"http://127.0.0.1:{port}"
        yield health


async def test_ready_follows_the_phase(health: Health) -> None:
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


async def test_a_scrape_asks_for_fresh_figures(health: Health) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{health.url}/metrics") as reply:
        assert reply.status == 200
        assert reply.content_type == "text/plain"
        assert "pagestream_worker_up" in await reply.text()
    assert health.num_refreshed == 1


async def test_a_port_that_is_taken_is_named(health: Health) -> None:
    port = int(health.url.rsplit(":", 1)[1])
    with pytest.raises(PortUnavailable, match=f"--metrics-port {port}"):
        async with Health().server.listen("127.0.0.1", port):
            pass
