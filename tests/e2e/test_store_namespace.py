"""Two deployments of one model name share a store, each in its own namespace."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.store.inference_client import InferenceClient
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from tests.e2e.batch_load import MAX_TOKENS, WORKER_FLAGS, client_at, prompt_of
from tests.faults.site import running_site
from tests.tiny_model import write_tiny_model

FLAGS = ["--store-namespace", "blue"]


@pytest.mark.timeout(120)
async def test_namespaces_see_nothing_of_each_other(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    flags = [*WORKER_FLAGS, *FLAGS]
    async with running_site(
        tmp_path, model, name="tiny", num_workers=1, worker_flags=flags, gateway_flags=FLAGS
    ) as site:
        connections = connect(site.store.url)
        other, same = (InferenceClient(connections, RedisKeys("tiny", name), "g") for name in ("", "blue"))
        await asyncio.gather(other.start(), same.start())
        try:
            async with client_at(site.ports["g0"]) as client:
                answer = await client.completions.create(model="tiny", prompt=prompt_of(1), max_tokens=MAX_TOKENS)
            assert answer.usage is not None and answer.usage.completion_tokens == MAX_TOKENS
            found: Any = await connections.commands.keys("*")
            names = [name.decode() for name in found]
            assert [name for name in names if name.startswith("{blue|tiny}:w:")]
            assert {name for name in names if not name.startswith("{blue|tiny}:")} <= {"{tiny}:clock"}
            while not same.fleet.snapshot():
                await asyncio.sleep(0.01)  # polls what heartbeats have brought
            assert other.fleet.snapshot() == []
        finally:
            await asyncio.gather(other.close(), same.close())
            await connections.aclose()
