"""The worker's small HTTP server: /metrics, /livez and /readyz. Not in the way of any request.

/livez says only that the event loop turns; /readyz that requests are being claimed, and what is missing until then.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from engine_worker.metrics import WorkerMetrics
from engine_worker.status import WorkerStatus
from shared.messages import WorkerPhase


class PortUnavailable(Exception):
    """Somebody else listens there, or the address is not this machine's."""


class HealthServer:
    def __init__(self, status: WorkerStatus, metrics: WorkerMetrics, refresh: Callable[[], Awaitable[None]]) -> None:
        """`refresh` brings status.stats up to date before a scrape is answered."""
        self._status = status
        self._metrics = metrics
        self._refresh = refresh

    @asynccontextmanager
    async def listen(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve while the context is open; yields the port, which is a free one if `port` is 0."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/livez", self._get_livez),
                web.get("/readyz", self._get_readyz),
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
