"""An application is freed after the test that made it."""

import gc
import weakref

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.typedefs import Handler

from tests.applications import forget_applications


@web.middleware
async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    return await handler(request)


async def answering() -> "weakref.ref[web.Application]":
    """Return an application that has answered a request and ended."""
    app = web.Application(middlewares=[middleware])

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="yes")

    app.router.add_get("/", answer)
    async with TestClient(TestServer(app)) as client, client.get("/") as response:
        assert await response.text() == "yes"
    return weakref.ref(app)


async def test_an_application_is_freed_after_its_test() -> None:
    app = await answering()
    gc.collect()
    assert app() is not None, "aiohttp keeps no application: tests/applications.py can go"
    forget_applications()
    gc.collect()
    assert app() is None
