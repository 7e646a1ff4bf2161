"""The worker's small HTTP server: /metrics, /livez, /readyz and /debug/kv. Beside all walks.

/livez says only that the event loop turns; /readyz that requests are being claimed, and what is missing until then.
/debug/kv shows every block and sequence, /debug/kv/events?since=NUMBER why blocks moved: request ids and counts, never
tokens. Both are where the metrics are, and nowhere else.

It knows the worker by its status, metrics and snapshots alone, and changes nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

from engine_worker.metrics import WorkerMetrics
from engine_worker.status import WorkerStatus
from shared.messages import WorkerPhase

ANSWER_SECONDS = 5.0  # between two steps the engine answers at once


class PortUnavailable(Exception):
    """Somebody else listens there, or the address is not this machine's."""


class KVDebug(Protocol):
    """EngineThread; to be asked only when the engine is loaded."""

    async def kv_view(self) -> dict[str, Any]: ...

    async def kv_events(self, since: int) -> dict[str, Any]: ...


class HealthServer:
    def __init__(
        self, status: WorkerStatus, metrics: WorkerMetrics, refresh: Callable[[], Awaitable[None]], kv: KVDebug
    ) -> None:
        """`refresh` brings status.stats up to date before a scrape is answered."""
        self._status = status
        self._metrics = metrics
        self._refresh = refresh
        self._kv = kv

    @asynccontextmanager
    async def listen(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve while the context is open; yields the port, which is a free one if `port` is 0."""
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
            return web.json_response({"error": "since: the number of an event, or 0"}, status=400)
        return await self._answer_when_loaded(lambda: self._kv.kv_events(int(since)))

    async def _answer_when_loaded(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> web.Response:
        if self._status.stats is None:
            return web.json_response({"error": "the engine is not loaded yet"}, status=503)
        try:
            return web.json_response(await asyncio.wait_for(ask(), ANSWER_SECONDS))
        except TimeoutError:
            return web.json_response({"error": "the engine is in a long step; ask again"}, status=503)
