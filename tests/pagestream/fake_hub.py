"""A Hugging Face hub on 127.0.0.1 with what `huggingface_hub` needs for a snapshot: byte ranges, and failures."""

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests.patience import PATIENCE_SECONDS

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    files: dict[str, bytes]
    repository: str = "org/tiny"
    token: str = ""  # required if set; the model is gated without it
    cut_after: dict[str, int] = field(default_factory=dict)  # byte at which a file's connection breaks, once
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, file, range
    endpoint: str = ""

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/models/{org}/{name}/revision/{revision:.+}", self._info)
        app.router.add_get("/api/models/{org}/{name}", self._info)
        app.router.add_get("/api/models/{org}/{name}/tree/{revision}", self._tree)
        app.router.add_route("*", "/{org}/{name}/resolve/{revision}/{file:.+}", self._file)
        return app

    def downloads(self) -> list[str]:
        return [name for method, name, _range in self.asked if method == "GET"]

    def _refusal(self, request: web.Request) -> web.Response | None:
        if f"{request.match_info['org']}/{request.match_info['name']}" != self.repository:
            return web.json_response({"error": "no"}, status=401, headers={"X-Error-Code": "RepoNotFound"})
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "gated"}, status=403, headers={"X-Error-Code": "GatedRepo"})
        if request.match_info.get("revision", "main") not in {"main", COMMIT}:
            return web.json_response({"error": "no"}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        return None

    async def _info(self, request: web.Request) -> web.Response:
        siblings = [{"rfilename": name} for name in self.files]
        return self._refusal(request) or web.json_response(
            {"id": self.repository, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
        )

    async def _tree(self, request: web.Request) -> web.Response:
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.files.items()
        ]
        return self._refusal(request) or web.json_response(entries)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refusal(request):
            return refusal
        name = request.match_info["file"]
        self.asked.append((request.method, name, request.headers.get("Range")))
        content = self.files[name]
        start = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        reply = web.StreamResponse(status=206 if start else 200)
        reply.headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
        reply.headers["X-Repo-Commit"] = COMMIT
        reply.content_length = len(content) - start
        if start:
            reply.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        await reply.prepare(request)
        if request.method == "HEAD":
            return reply
        if name in self.cut_after:
            assert request.transport is not None
            request.transport.set_write_buffer_limits(high=0)  # drain() then waits until the kernel has every byte
            await reply.write(content[start : self.cut_after.pop(name)])
            await request.writer.drain()
            request.transport.abort()
            return reply
        await reply.write(content[start:])
        return reply


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the hub in a thread, so that a test may wait for a process that uses it."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(hub.application())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(PATIENCE_SECONDS)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
