"""The inference requests that this gateway is answering, of all models together: a drain waits for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import Gauge

UNKNOWN_ROUTE = "unknown"


def route_name(request: web.Request) -> str:
    """For labels and counts: the pattern that was matched, never the URL."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else UNKNOWN_ROUTE


class OpenRequests:
    def __init__(self, gauge: Gauge, max_open: int) -> None:
        """`gauge` has the label of the route. `max_open` is for admission to ask; nothing is refused here."""
        self.max_open = max_open
        self.num_open = 0
        self.draining = False  # no more are admitted
        self._gauge = gauge
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def counted(self, request: web.Request) -> Iterator[None]:
        gauge = self._gauge.labels(route_name(request))
        self.num_open += 1
        self._idle.clear()
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()
            self.num_open -= 1
            if self.num_open == 0:
                self._idle.set()

    async def wait_idle(self, timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
