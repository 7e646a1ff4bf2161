"""One key exhausts streams, attaches and bytes: beyond its share it gets 429, and another key is served."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from gateway.http.json_body import MAX_BODY_BYTES
from gateway.http.open_response import PIECE_BYTES
from shared.messages import GenerationRequest, StreamEvent, TokenEvent, TokenLogprobs, encoded_logprobs
from shared.new_requests import RetentionTerms
from tests.gateway.auth.test_access import KEY, OTHER, PROMPT, bearer, entry
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeStream, finish, says
from tests.golden.engine import KeepingInferenceClient
from tests.patience import PATIENCE_SECONDS

URL = "/v1/completions"
NUM_STREAMS = 10  # one key may have 8
NUM_BODIES = 8  # of the largest size; one key may have 7
Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
NUM_TOKENS = 1_000  # with 20 alternatives each: half a megabyte, more than a socket's buffers
SCORED = {**PROMPT, "logprobs": 20}


def says_much(request: GenerationRequest) -> list[StreamEvent]:
    likeliest = tuple(range(70, 90))
    scores = encoded_logprobs(TokenLogprobs(-1.0, likeliest, tuple(-1.0 - index / 1024 for index in likeliest)))
    tokens = [TokenEvent(request.request_id, index, [70], logprobs=[scores]) for index in range(NUM_TOKENS)]
    return [*tokens, finish(request, NUM_TOKENS)]


class HalfReadEngine(KeepingInferenceClient):
    """An engine with stored answers whose end a reader never receives."""

    async def attach_all(
        self, requests: Sequence[GenerationRequest], terms_of_each: Sequence[RetentionTerms]
    ) -> list[FakeStream]:
        streams = [FakeStream(request) for request in requests]
        for stream in streams:
            stream.send(TokenEvent(stream.request.request_id, 0, [70]))
        return streams


class CountingEngine(KeepingInferenceClient):
    """Count the attaches to a stored answer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attaches = 0

    async def attach_all(
        self, requests: Sequence[GenerationRequest], terms_of_each: Sequence[RetentionTerms]
    ) -> list[FakeStream]:
        self.num_attaches += 1
        return await super().attach_all(requests, terms_of_each)


async def start_with_keys(
    start_gateway: Callable[..., Any], tmp_path: Path, engine: KeepingInferenceClient, *, keys: int = 2, **settings: Any
) -> Gateway:
    path = tmp_path / "keys.toml"
    path.write_text("".join([entry("a", KEY), entry("b", OTHER)][:keys]))
    gateway: Gateway = await start_gateway(engine, api_keys_file=path, **settings)
    return gateway


async def keep(gateway: Gateway, body: dict[str, Any] = PROMPT) -> str:
    """Make a stored answer of the first key; return its id."""
    headers = bearer(KEY) | {"Idempotency-Key": "mine"}
    async with gateway.session.post(URL, json={**body, "stream": True}, headers=headers) as reply:
        assert reply.status == 200
        await reply.read()
        return reply.headers["Content-Location"].rpartition("/")[2]


@asynccontextmanager
async def opened(
    gateway: Gateway, head: bytes, key: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection that sends this head; the client reads only on request."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # set before connecting, or it has no effect
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", gateway.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    writer.write(head + b"\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + key.encode() + b"\r\n\r\n")
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


def body_head(num_bytes: int) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d" % num_bytes


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Return the status and the rest of the received data."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        status = int((await reader.readline()).split()[1])
        return status, (await reader.readuntil(b"}}")).decode()


@pytest.mark.parametrize("kind", ["stream", "attach", "repeat"])
async def test_streams_beyond_a_share_are_refused(start_gateway: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    engine = HalfReadEngine()
    gateway = await start_with_keys(start_gateway, tmp_path, engine, max_num_streams=NUM_STREAMS)
    engine.script = says([70])
    answer_id = await keep(gateway)
    named = {"Idempotency-Key": "mine"} if kind == "repeat" else {}
    if kind == "stream":
        engine.script = lambda request: [TokenEvent(request.request_id, 0, [70])]

    async with AsyncExitStack() as stack:

        async def ask(key: str) -> tuple[int, Any]:
            headers = bearer(key) | named
            asked = (
                gateway.session.get(f"/v1/requests/{answer_id}/events", headers=headers)
                if kind == "attach"
                else gateway.session.post(URL, json={**PROMPT, "stream": True}, headers=headers)
            )
            reply = await stack.enter_async_context(asked)
            return reply.status, None if reply.status == 200 else await reply.json()

        answers = [await ask(KEY) for _ in range(20)]
        assert [status for status, _ in answers] == [200] * 8 + [429] * 12
        error = answers[-1][1]["error"]
        assert error["code"] == "key_share_exceeded" and "--max-num-streams" in error["message"]
        rejected = gateway.metric("pagestream_requests_rejected_total", reason="key_share_exceeded")
        assert rejected == 12
        if kind != "attach":
            assert (await ask(OTHER))[0] == 200
        else:  # it has no answer: admitted, then not found
            assert (await ask(OTHER))[0] == 404


async def test_unfinished_bodies_beyond_a_share_are_refused(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    engine = KeepingInferenceClient()
    engine.script = says([5])
    limit = NUM_BODIES * MAX_BODY_BYTES
    gateway = await start_with_keys(start_gateway, tmp_path, engine, max_bytes_in_flight=limit)
    held = gateway.state.bytes_in_flight

    def holds(num_bodies: int) -> bool:
        return held.num_held == num_bodies * MAX_BODY_BYTES

    async with AsyncExitStack() as stack:
        for number in range(1, NUM_BODIES):
            await stack.enter_async_context(opened(gateway, body_head(MAX_BODY_BYTES), KEY))
            await eventually(partial(holds, number))
        reader, _ = await stack.enter_async_context(opened(gateway, body_head(MAX_BODY_BYTES), KEY))
        status, text = await answer_of(reader)
        assert status == 429 and "key_share_exceeded" in text and "--max-bytes-in-flight" in text
        for _ in range(20):
            async with gateway.session.post(URL, json=PROMPT, headers=bearer(OTHER)) as reply:
                assert reply.status == 200
    await eventually(lambda: held.num_held == 0)


async def test_lone_key_fills_all_bytes_and_then_gets_503(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    limit = NUM_BODIES * MAX_BODY_BYTES
    gateway = await start_with_keys(
        start_gateway, tmp_path, KeepingInferenceClient(), keys=1, max_bytes_in_flight=limit
    )
    held = gateway.state.bytes_in_flight
    async with AsyncExitStack() as stack:
        for _ in range(NUM_BODIES):
            await stack.enter_async_context(opened(gateway, body_head(MAX_BODY_BYTES), KEY))
        await eventually(lambda: held.num_held == limit)
        reader, _ = await stack.enter_async_context(opened(gateway, body_head(10), KEY))
        status, text = await answer_of(reader)
        assert status == 503 and "gateway_full" in text and "--max-bytes-in-flight" in text


async def test_chunked_body_counts_its_maximum_until_it_is_read(gateway: Gateway) -> None:
    held, head = (
        gateway.state.bytes_in_flight,
        body_head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"),
    )
    async with opened(gateway, head, "none") as (reader, writer):
        await eventually(lambda: held.num_held == MAX_BODY_BYTES)
        writer.write(b"2\r\n{}\r\n0\r\n\r\n")
        assert (await answer_of(reader))[0] == 400
    assert held.num_held == 0


async def test_kept_body_is_built_once_for_slow_readers(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    engine = CountingEngine()
    engine.script = says_much
    gateway = await start_with_keys(start_gateway, tmp_path, engine)
    answer_id = await keep(gateway, SCORED)
    url, held = f"/v1/requests/{answer_id}", gateway.state.bytes_in_flight
    async with gateway.session.get(url, headers=bearer(KEY)) as reply:
        body = await reply.read()
    assert reply.status == 200 and len(body) > 2 * PIECE_BYTES
    await eventually(lambda: held.num_held == 0)
    num_alone = engine.num_attaches
    async with AsyncExitStack() as stack:
        readers = [
            (await stack.enter_async_context(opened(gateway, b"GET %b HTTP/1.1" % url.encode(), KEY)))[0]
            for _ in range(30)
        ]
        for reader in readers:
            assert b"200" in await reader.readline()
        assert engine.num_attaches == num_alone + 1
        assert held.num_held == len(body)
        async with gateway.session.get(url, headers=bearer(KEY)) as reply:
            assert await reply.read() == body
        async with gateway.session.get(url, headers=bearer(OTHER)) as reply:
            assert reply.status == 404
        await engine.erase([answer_id])
        async with gateway.session.get(url, headers=bearer(KEY)) as reply:
            assert reply.status == 404
    await eventually(lambda: held.num_held == 0)


async def test_kept_bodies_beyond_a_share_are_refused(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    """Distinct answers, so that nothing is shared. A refused answer can be read later."""
    engine = KeepingInferenceClient()
    engine.script = says_much
    gateway = await start_with_keys(start_gateway, tmp_path, engine, max_bytes_in_flight=4 * 2**20)
    headers, body = bearer(KEY), {**SCORED, "stream": True, "detach_seconds": 60}
    ids = []
    for _ in range(12):
        async with gateway.session.post(URL, json=body, headers=headers) as reply:
            await reply.read()
            ids.append(reply.headers["Content-Location"])
    async with AsyncExitStack() as stack:
        statuses = []
        for location in ids:
            head = b"GET %b HTTP/1.1" % location.encode()
            reader, _ = await stack.enter_async_context(opened(gateway, head, KEY))
            statuses.append(int((await reader.readline()).split()[1]))
        num_served = statuses.count(200)
        assert statuses == [200] * num_served + [429] * (len(ids) - num_served)
        assert 2 <= num_served < len(ids)
        async with gateway.session.post(URL, json=PROMPT, headers=bearer(OTHER)) as reply:
            assert reply.status == 200
    await eventually(lambda: gateway.state.bytes_in_flight.num_held == 0)
    async with gateway.session.get(ids[-1], headers=headers) as reply:
        assert reply.status == 200
