"""run-batch asks a busy server until it answers, and asks again for lines that had no answer."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pagestream import run_batch


class Server:
    """Answers each request with the next of its statuses, and then with 200."""

    def __init__(self, *statuses: int, headers: dict[str, str] | None = None) -> None:
        self.statuses = list(statuses)
        self.headers = headers or {}
        self.num_requests = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.num_requests += 1
        if self.statuses:
            status = self.statuses.pop(0)
            return web.json_response({"error": {}}, status=status, headers={"Retry-After": "0"} | self.headers)
        return web.json_response({"text": "yes"})


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/responses", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "x"}}))
    return path, tmp_path / "out.jsonl"


def results(path: Path) -> list[tuple[str, int | None]]:
    found = map(json.loads, path.read_text().splitlines())
    return [(one["custom_id"], (one["response"] or {}).get("status_code")) for one in found]


async def test_busy_server_is_asked_until_it_answers(files: tuple[Path, Path]) -> None:
    server = Server(*[429, 503] * 30)
    async with serving(server) as url:
        assert await run_batch.run(*files, url, "", 1) == 0
    assert server.num_requests == 61 and results(files[1]) == [("a", 200)]


async def test_request_that_must_not_be_repeated_is_final(files: tuple[Path, Path]) -> None:
    server = Server(500, headers={"x-should-retry": "false"})
    async with serving(server) as url:
        assert await run_batch.run(*files, url, "", 1) == 1
    assert results(files[1]) == [("a", 500)]


async def test_line_without_an_answer_is_sent_again_by_the_next_run(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr(run_batch, "MAX_SILENT_ATTEMPTS", 1)
    monkeypatch.setattr(run_batch, "MAX_PAUSE_SECONDS", 0.0)
    assert await run_batch.run(*files, f"http://127.0.0.1:{unused_tcp_port}", "", 1) == 1
    assert results(files[1]) == [("a", None)]
    async with serving(Server()) as url:
        assert await run_batch.run(*files, url, "", 1) == 0
    assert results(files[1]) == [("a", 200)]
