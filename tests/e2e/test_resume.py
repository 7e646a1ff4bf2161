"""A gateway is killed in the middle of streams, and another one continues them. Real processes."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.serving.free_port import free_port
from shared.redis_keys import GROUP, RedisKeys
from shared.redis_scripts import RedisScripts
from tests.conftest import Valkey
from tests.e2e.fleet import Fleet, connected, running_fleet

SCRIPT = str(Path(__file__).with_name("scripted_worker.py"))
PROMPT = [5, 6, 7]  # the scripted model has text for the first thousand tokens
BODIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7, "n": 3},
    {"temperature": 1, "seed": 8, "logprobs": 1},
    {"temperature": 1, "seed": 9, "stop": ["the", "e"]},
]


@dataclass
class ReceivedAnswer:
    """What a client has received of one answer, over all its connections."""

    request_id: str = ""
    last_event_id: str = ""
    data: list[str] = field(default_factory=list)

    async def read(self, reply: aiohttp.ClientResponse) -> None:
        assert reply.status == 200, await reply.text()
        self.request_id = reply.headers["Content-Location"].rpartition("/")[2]
        event_id = ""
        async for line in reply.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                self.data.append(value)
                self.last_event_id = event_id or self.last_event_id

    async def has(self, num_events: int) -> None:
        async with asyncio.timeout(60):
            while len(self.data) < num_events and self.last_event_id != "end":
                await asyncio.sleep(0.005)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path / "logs") as fleet:
        yield fleet


@pytest.fixture
async def urls(fleet: Fleet, valkey: Valkey, keys: RedisKeys, demo_model_dir: Path) -> AsyncIterator[list[str]]:
    """Return two gateways, each with its own port."""
    names = ["--served-model-name", keys.model_name, "--redis-url", valkey.url]
    worker = ["--model", "/none", *names, "--metrics-port", "0", "--worker-id", "w0", "--script-step-seconds", "0.01"]
    fleet.start("w0", SCRIPT, *worker, PYTHONPATH=os.getcwd())
    ports = [free_port(), free_port()]
    for number, port in enumerate(ports):
        gateway = ["-m", "gateway", "--model", str(demo_model_dir), *names, "--port", str(port)]
        fleet.start(f"g{number}", *gateway, PYTHONPATH=os.getcwd())
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for url in urls:
        async with connected(url, keys.model_name) as api:
            await api.wait_until_ready(fleet)
    yield urls


async def test_streams_of_a_killed_gateway_continue_at_another(
    fleet: Fleet, urls: list[str], scripts: RedisScripts, keys: RedisKeys
) -> None:
    """Each client gets every event once, as without the kill; the store and the worker are empty at the end."""
    async with aiohttp.ClientSession() as session:

        async def begin(received: ReceivedAnswer, options: dict[str, Any]) -> None:
            body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "stream": True, "detach_seconds": 60}
            try:
                async with session.post(f"{urls[0]}/v1/completions", json={**body, **options}) as reply:
                    await received.read(reply)
            except aiohttp.ClientError:
                pass  # the gateway is gone

        answers = [ReceivedAnswer() for _ in BODIES]
        streams = [asyncio.create_task(begin(received, body)) for received, body in zip(answers, BODIES, strict=True)]
        await asyncio.gather(*(received.has(20) for received in answers))
        fleet.processes["g0"].kill()
        await asyncio.gather(*streams)
        assert answers[0].last_event_id != "end"

        for received in answers:
            await resume(session, urls[1], received)
            assert received.last_event_id == "end"
            whole = ReceivedAnswer()
            async with session.get(f"{urls[1]}/v1/requests/{received.request_id}/events") as reply:
                await whole.read(reply)
            assert sorted(received.data) == sorted(whole.data)  # each choice in its order
            async with session.get(f"{urls[1]}/v1/requests/{received.request_id}") as reply:
                assert (await reply.json())["state"] == "finished"
    for queue in keys.queues:
        assert await scripts.redis.xlen(queue) == 0
        assert (await scripts.redis.xpending(queue, GROUP))["pending"] == 0


async def resume(session: aiohttp.ClientSession, url: str, received: ReceivedAnswer) -> None:
    headers = {"Last-Event-ID": received.last_event_id}
    async with session.get(f"{url}/v1/requests/{received.request_id}/events", headers=headers) as reply:
        if reply.status != 204:
            await received.read(reply)
