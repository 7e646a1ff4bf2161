"""The worker's HTTP server: /metrics, /livez, /readyz, and /debug/kv.

/livez reports that the event loop runs, /readyz whether requests are claimed, else the phase. /debug/kv returns every
block and sequence, /debug/kv/events?since=NUMBER the block moves: request ids and counts, never tokens.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

from engine_worker.metrics import WorkerMetrics
from engine_worker.status import WorkerStatus
from shared.messages import WorkerPhase

ANSWER_SECONDS = 5.0  # the engine answers between two steps


class PortUnavailable(Exception):
    """The address is in use, or does not belong to this machine."""


class KVDebug(Protocol):
    """The debug views of EngineThread, available once the engine is loaded."""

    async def kv_view(self) -> dict[str, Any]: ...

    async def kv_events(self, since: int) -> dict[str, Any]: ...


class HealthServer:
    def __init__(
        self, status: WorkerStatus, metrics: WorkerMetrics, refresh: Callable[[], Awaitable[None]], kv: KVDebug
    ) -> None:
        """Create the server. `refresh` updates status.stats before each scrape."""
        self._status = status
        self._metrics = metrics
        self._refresh = refresh
        self._kv = kv

    @asynccontextmanager
    async def listen(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve while the context is open. Yields the port; `port` 0 selects a free one.

        Raises PortUnavailable.
        """
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/livez", self._get_livez),
                web.get("/readyz", self._get_readyz),
                web.get("/debug/kv", self._get_kv),
                web.get("/debug/kv/events", self._get_kv_events),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise PortUnavailable(f"--metrics-host {host} --metrics-port {port}: {error.strerror}") from error
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    async def _get_metrics(self, request: web.Request) -> web.Response:
        await self._refresh()
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._metrics.render(), headers={"Content-Type": content_type})

    async def _get_livez(self, request: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _get_readyz(self, request: web.Request) -> web.Response:
        now = self._status.now
        body = {"worker_id": self._status.worker_id, "phase": now.phase, "progress": now.progress, "detail": now.detail}
        return web.json_response(body, status=200 if now.phase == WorkerPhase.READY else 503)

    async def _get_kv(self, request: web.Request) -> web.Response:
        return await self._answer_when_loaded(self._kv.kv_view)

    async def _get_kv_events(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "0")
        if not (since.isascii() and since.isdecimal() and len(since) < 16):
            return web.json_response({"error": f"since: expected an event number or 0, got {since[:20]!r}"}, status=400)
        return await self._answer_when_loaded(lambda: self._kv.kv_events(int(since)))

    async def _answer_when_loaded(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> web.Response:
        if self._status.stats is None:
            return web.json_response({"error": "the engine is not loaded yet"}, status=503)
        try:
            return web.json_response(await asyncio.wait_for(ask(), ANSWER_SECONDS))
        except TimeoutError:
            return web.json_response({"error": "the engine is in a long step; try again"}, status=503)
