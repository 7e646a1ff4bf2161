"""Run the load generator against a fake server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.serving import load_generator
from bench.serving.load_generator import main
from bench.workload import PlannedRequest, Workload

Behavior = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]


async def write_event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def answer(response: web.StreamResponse, body: dict[str, Any], tokens: int | None = None) -> None:
    tokens = body["max_tokens"] if tokens is None else tokens
    chat = "messages" in body
    if chat:
        await write_event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    for _ in range(tokens):
        choice = {"delta": {"content": "x"}} if chat else {"text": "x"}
        await write_event(response, {"choices": [{**choice, "finish_reason": None}], "usage": None})
        await response.write(b": keep-alive\n\n")
    await write_event(response, {"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
    prompt_tokens = 40 if chat else len(body["prompt"])
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    await write_event(response, {"choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")


async def one_token_less(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await answer(response, body, body["max_tokens"] - 1)


async def cut_short(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await write_event(response, {"choices": [{"text": "x", "finish_reason": None}]})


async def error_event(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await write_event(response, {"error": {"message": "worker lost", "code": "worker_lost"}})
    await response.write(b"data: [DONE]\n\n")


async def garbage(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(b"data: {nonsense\n\n")


async def one_prompt_token_less(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await answer(response, {**body, "prompt": body["prompt"][1:]})


class FakeServer:
    """Record the requests that it receives; `behave` writes the body of each answer."""

    def __init__(self) -> None:
        self.behave: Behavior = answer
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.models: Any = {"data": [{"id": "fake-model"}]}
        self.open_requests = 0
        self.most_open_requests = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "the queue is full"}}, status=self.status)
        self.open_requests += 1
        self.most_open_requests = max(self.most_open_requests, self.open_requests)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.behave(response, body)
        self.open_requests -= 1
        return response

    def app(self) -> web.Application:
        async def models(request: web.Request) -> web.Response:
            return web.json_response(self.models)

        async def version(request: web.Request) -> web.Response:
            return web.json_response({"version": "9.9"})

        app = web.Application()
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/version", version)
        return app


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, str]]:
    server = FakeServer()
    async with TestServer(server.app()) as running:
        yield server, str(running.make_url("/v1"))


async def bench(url: str, *options: str) -> int:
    lengths = ["--prompt-tokens", "4", "--output-tokens", "6", "--warmup", "0"]
    return await asyncio.to_thread(main, ["--url", url, *lengths, *options])


async def test_load_generator_writes_table_and_files(
    fake: tuple[FakeServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, url = fake
    report, picture = tmp_path / "new" / "report.json", tmp_path / "new" / "report.png"
    options = ["--num-requests", "5", "--concurrency", "1,2", "--json", str(report), "--png", str(picture)]
    assert await bench(url, *options) == 0
    content = json.loads(report.read_text())
    assert content["model"] == "fake-model"
    assert content["server"] == {"version": "9.9"}
    assert content["command"].startswith("python -m bench --url")
    assert content["commit"]
    assert [run["load"] for run in content["runs"]] == [{"concurrency": 1}, {"concurrency": 2}]
    for run in content["runs"]:
        assert (run["requests"], run["failed_requests"]) == (5, 0)
        assert (run["prompt_tokens"], run["output_tokens"], run["events_per_token"]) == (20, 30, 1.0)
        first, last = run["time_to_first_token_seconds"], run["end_to_end_seconds"]
        assert 0 < first["p50"] <= first["p99"] <= last["max"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["load", "requests"]
    assert [line.split()[:4] for line in lines] == [["concurrency", "1", "5", "0"], ["concurrency", "2", "5", "0"]]


async def test_request_is_deterministic_with_exact_length(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    assert await bench(url, "--num-requests", "1", "--extra-body", '{"top_k": 3}') == 0
    body = server.bodies[0]
    assert len(body.pop("prompt")) == 4
    assert body == {
        "model": "fake-model",
        "max_tokens": 6,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 3,
    }


async def test_chat_ttft_ends_at_the_first_content(fake: tuple[FakeServer, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert await bench(fake[1], "--num-requests", "2", "--api", "chat", "--json", str(report)) == 0
    assert json.loads(report.read_text())["runs"][0]["events_per_token"] == 1.0


@pytest.mark.parametrize("limit", [1, 3, 20])
async def test_concurrency_limits_open_requests(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    open_requests, seen = 0, []

    async def send(target: Any, request: PlannedRequest) -> PlannedRequest:
        nonlocal open_requests
        open_requests += 1
        seen.append(open_requests)
        await asyncio.sleep(0)
        open_requests -= 1
        return request

    monkeypatch.setattr(load_generator, "send", send)
    workload = Workload(lengths=[(4, 6)] * 9, token_ids=range(100, 110), seed=1)
    target: Any = None
    results = await load_generator._run(target, workload, limit, float("inf"), "measured")
    assert len(results) == len(seen) == 9
    assert max(seen) == min(limit, 9)


async def test_rate_sends_without_waiting_for_answers(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    everyone_is_there = asyncio.Barrier(9)

    async def together(response: web.StreamResponse, body: dict[str, Any]) -> None:
        await everyone_is_there.wait()
        await answer(response, body)

    server.behave = together
    assert await bench(url, "--num-requests", "9", "--rate", "1000") == 0
    assert server.most_open_requests == 9


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (one_token_less, "5 tokens in usage, 6 were requested"),
        (one_prompt_token_less, "3 prompt tokens in usage, 4 were sent"),
        (cut_short, "the stream ended without [DONE]"),
        (error_event, "worker lost"),
        (garbage, "DecodeError"),
    ],
)
async def test_short_answer_is_a_failure(
    fake: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str], behave: Behavior, message: str
) -> None:
    fake[0].behave = behave
    assert await bench(fake[1], "--num-requests", "3") == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out.splitlines()[1].split()[2:5] == ["3", "3", "-"]


async def test_error_status_is_a_failure(fake: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]) -> None:
    fake[0].status = 503
    assert await bench(fake[1], "--num-requests", "2") == 1
    assert "HTTP 503" in capsys.readouterr().err


async def test_stop_at_eos_accepts_any_length(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    server.behave = one_token_less
    assert await bench(url, "--num-requests", "1", "--stop-at-eos") == 0
    assert "ignore_eos" not in server.bodies[0]


async def test_unreachable_server_exits_with_2(unused_tcp_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(f"http://127.0.0.1:{unused_tcp_port}") == 2
    assert "bench: Cannot connect" in capsys.readouterr().err


@pytest.mark.parametrize("models", [{"data": []}, {}, []])
async def test_server_without_a_model_exits_with_2(
    fake: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str], models: Any
) -> None:
    fake[0].models = models
    assert await bench(fake[1]) == 2
    assert "/v1/models lists no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--rate", "0"], ["--concurrency", "0"], ["--token-ids", "9:3"], ["--trace", "/no/such/file"]]
)
def test_bad_options_are_refused(options: list[str]) -> None:
    try:
        assert main(["--url", "http://127.0.0.1:9", *options]) == 2
    except SystemExit as refused:
        assert refused.code == 2
