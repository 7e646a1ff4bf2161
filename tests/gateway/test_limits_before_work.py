"""On every route, a request over a limit is refused before its body is read, decoded or encoded.

The bodies have the maximum length, and the client never sends them: any answer proves that the gateway did not wait.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.rate_limits import Account
from gateway.http.json_body import MAX_BODY_BYTES
from tests.gateway.auth.test_access import KEY, bearer
from tests.gateway.conftest import Gateway
from tests.gateway.test_charging import limited
from tests.patience import PATIENCE_SECONDS

UPLOAD = "/v1/files"


@pytest.fixture
async def gateway(start_gateway: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest) -> Gateway:
    """Start a gateway with every route and two keys; the parameter sets the first key's limits."""
    return await limited(start_gateway, tmp_path, **getattr(request, "param", {"tokens_per_minute": 1_000}))


# Further APIs may add routes to both.
GENERATING = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
READING_ANSWERS = {"/v1/responses/compact", "/v1/requests/{id}", "/v1/requests/{id}/events", "/v1/responses/{id}"}


@pytest.fixture
def account(gateway: Gateway) -> Account:
    return gateway.access.account(bearer(KEY))


@pytest.fixture
def work(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the work that was done."""
    done: list[str] = []
    for name, target in {
        "read": "gateway.http.body._read",
        "upload": "gateway.apis.files.files.receive_upload",
        "decode": "gateway.http.json_body.msgspec.json.decode",
        "pool": "gateway.work.reader_pool.ReaderPool.run",
        "store": "tests.gateway.fake_inference.FakeInferenceClient.stored",
    }.items():
        monkeypatch.setattr(target, lambda *_, name=name, **__: done.append(name))
    return done


async def refusal_of_unsent(gateway: Gateway, method: str, path: str) -> str:
    """Announce the largest body, send none of it, and return the error code.

    Anthropic's errors have no code; return their status.
    """
    url = path.replace("{id}", "0" * 32)
    size = gateway.state.settings.max_file_bytes if path == UPLOAD else MAX_BODY_BYTES
    media_type = "multipart/form-data; boundary=a" if path == UPLOAD else "application/json"
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        head = f"{method} {url} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
        writer.write(f"{head}Content-Type: {media_type}\r\nContent-Length: {size}\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_SECONDS):
            status_line, _, headers = (await reader.readuntil(b"\r\n\r\n")).decode().partition("\r\n")
            length = int(headers.partition("Content-Length: ")[2].partition("\r")[0])
            body = json.loads(await reader.readexactly(length))
        named = body if path.startswith("/api/") else body["error"]  # Ollama's error is a text beside its code
        return named.get("code") or status_line.split()[1]
    finally:
        writer.transport.abort()


def routes(gateway: Gateway, *methods: str) -> list[tuple[str, str]]:
    return [(one.method, one.path) for one in gateway.operations if one.method in methods and not one.uncharged]


def generating(gateway: Gateway) -> set[str]:
    return {operation.path for operation in gateway.operations if operation.generates}


@pytest.mark.parametrize("gateway", [{"requests_per_minute": 1}], indirect=True)
async def test_key_without_requests_left_costs_no_work(gateway: Gateway, account: Account, work: list[str]) -> None:
    account.begin(generates=False)
    asked = routes(gateway, "GET", "POST", "DELETE")
    assert len(asked) > 20
    for method, path in asked:
        assert await refusal_of_unsent(gateway, method, path) in ("429", "requests_per_minute_exceeded"), path
    assert work == []


async def test_key_in_debt_costs_no_work(gateway: Gateway, account: Account, work: list[str]) -> None:
    account.spend(100_000)
    assert generating(gateway) >= GENERATING
    for path in generating(gateway):
        assert await refusal_of_unsent(gateway, "POST", path) in ("429", "tokens_per_minute_exceeded"), path
    assert work == []


@pytest.mark.parametrize(("status", "code"), [("503", "draining"), ("429", "key_share_exceeded")])
async def test_request_that_is_not_admitted_costs_no_work(
    gateway: Gateway, account: Account, work: list[str], status: str, code: str
) -> None:
    open_requests = gateway.state.open_requests
    open_requests.draining = code == "draining"
    if code == "key_share_exceeded":
        for _ in range(gateway.state.settings.max_num_streams * 4 // 5 + 1):
            open_requests.admit("test", account)
    asked = [(operation.method, operation.path) for operation in gateway.operations if operation.is_admitted]
    assert {path for _, path in asked} >= generating(gateway) | READING_ANSWERS
    for method, path in asked:
        assert await refusal_of_unsent(gateway, method, path) in (status, code), (method, path)
    assert work == []


async def test_body_without_room_is_not_read(gateway: Gateway, account: Account, work: list[str]) -> None:
    room = gateway.state.bytes_in_flight
    room.take(account, room.total * 4 // 5)
    reading = [path for _, path in routes(gateway, "POST") if path != UPLOAD and not path.endswith("/cancel")]
    assert set(reading) > generating(gateway)
    for path in reading:
        assert await refusal_of_unsent(gateway, "POST", path) in ("429", "key_share_exceeded"), path
    assert work == []
