"""A gateway dies with its streams; clients read slowly, or not at all. All other clients are unaffected."""

import asyncio
import random
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tokenizers import Tokenizer

from tests.faults.mixed_requests import RequestMix
from tests.faults.site import Site, running_site
from tests.faults.stream_client import StreamClient

pytestmark = pytest.mark.timeout(600)
SEED = 11
STALL_SECONDS = 2
# The longest name. It is in every event, so a stream of six choices has 6 MB, which is more than the kernel buffers for
# a client that reads nothing.
NAME = "m" * 255


@pytest.fixture
async def site(demo_model_dir: Path, tmp_path: Path) -> AsyncIterator[Site]:
    flags = ["--script-step-seconds", "0.01", "--script-num-blocks", "20001"]
    gateway_flags = ["--write-stall-seconds", str(STALL_SECONDS)]
    options: dict[str, Any] = {"worker_flags": flags, "gateway_flags": gateway_flags, "name": NAME}
    async with running_site(tmp_path, demo_model_dir, num_workers=1, **options) as site:
        yield site


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session


def mix_of(model: Path) -> RequestMix:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return RequestMix(random.Random(SEED), tokenizer, NAME, max_tokens=300)


async def stream_through(client: StreamClient, mix: RequestMix, count: int) -> list[int]:
    """Run concurrent streams, all correct; return how often each was resumed."""
    requests = [mix.draw() for _ in range(count)]
    answers = await asyncio.gather(*(client.complete(request.body) for request in requests))
    assert [request.difference(answer) for request, answer in zip(requests, answers, strict=True)] == [""] * count
    return [answer.num_resumes for answer in answers]


async def test_streams_of_a_killed_gateway_continue_at_another(
    site: Site, session: aiohttp.ClientSession, demo_model_dir: Path
) -> None:
    client = StreamClient(session, site.urls, random.Random(SEED))
    streams = asyncio.create_task(stream_through(client, mix_of(demo_model_dir), 16))
    await asyncio.sleep(1.5)  # until the middle of the streams
    await site.end("g0", signal.SIGKILL)
    assert sum(await streams) > 0
    await site.nothing_is_left()


async def test_slow_and_stopped_clients_delay_no_other_stream(
    site: Site, session: aiohttp.ClientSession, demo_model_dir: Path
) -> None:
    """One client reads ten bytes per second; one reads nothing, and is cut and cancelled after the stall time."""
    lazy = [await open_stream(site.ports["g0"]) for _ in range(2)]
    slow_reader = asyncio.create_task(read_slowly(lazy[0]))
    client = StreamClient(session, site.urls[:1], random.Random(SEED))
    assert sum(await stream_through(client, mix_of(demo_model_dir), 8)) == 0
    async with asyncio.timeout(60):
        while await metric(session, site.urls[0], "pagestream_gateway_write_stalls_total") < 2:
            await asyncio.sleep(0.1)
    slow_reader.cancel()
    for connection in lazy:
        connection.close()
    await site.nothing_is_left()


async def open_stream(port: int) -> socket.socket:
    body = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 6}
    content = msgspec.json.encode(body)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
    await loop.sock_sendall(connection, f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
    reply = await loop.sock_recv(connection, 1024)
    assert reply.startswith(b"HTTP/1.1 200"), reply
    return connection


async def read_slowly(connection: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(connection, 10):
        await asyncio.sleep(1)


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    async with session.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
