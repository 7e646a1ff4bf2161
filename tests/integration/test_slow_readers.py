"""A slow reader on a real socket receives its whole response and delays no other client."""

import asyncio
import json
import socket
from typing import Any

from tests.engine_worker.worker_harness import FOREVER_STEPS
from tests.integration.conftest import COMPLETIONS, World, nothing_is_left
from tests.patience import PATIENCE_SECONDS

# 8 choices of 24 tokens with 20 logprobs each give 300 kB of events, more than the client and aiohttp buffer.
LONG = {"prompt": "Hi", "max_tokens": 24, "ignore_eos": True, "n": 8, "seed": 1, "logprobs": 20, "stream": True}


async def open_socket(world: World, number: int, body: dict[str, Any]) -> socket.socket:
    """Send a request and read nothing."""
    url = world.gateways[number].session._base_url
    assert url is not None
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # only effective before connect
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (url.host, url.port))
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(client, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return client


async def test_slow_reader_receives_all_and_delays_no_client(world: World) -> None:
    late = await open_socket(world, 0, LONG)
    while not world.worker.gate.batches:
        await asyncio.sleep(0.005)
    world.worker.gate.allow(FOREVER_STEPS)
    await nothing_is_left(world)  # the engine has finished the request
    status, _ = await world.gateways[0].post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 20, "temperature": 0})
    assert status == 200
    received = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while b"[DONE]" not in received:
            received += await asyncio.get_running_loop().sock_recv(late, 65_536)
    late.close()
    assert received.count(b'"finish_reason":"length"') == 8
    assert received.count(b"data: ") == 8 * 25 + 1  # 24 tokens and an end per choice, and [DONE]
