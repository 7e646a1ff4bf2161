"""Store shares: an API key that retains as much as it can leaves room for the others."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.store.store_probe import CLOSE_AT_RATIO
from tests.engine_worker.worker_harness import FOREVER_STEPS, eventually
from tests.integration.conftest import COMPLETIONS, Gateway, World
from tests.integration.test_kept_requests import write_keys

KEYS = {"one": "sk-one-0123456789abcdef", "two": "sk-two-0123456789abcdef"}
ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
SHORT = {"prompt": "x", "max_tokens": 1, "detach_seconds": 0}
STORE_BYTES = 24 * 2**20


@pytest.fixture
async def store(world: World) -> AsyncIterator[World]:
    """Limit the store's memory. Gateways started later know the limit before they accept a request."""
    redis = world.connections.commands
    world.worker.gate.allow(FOREVER_STEPS)
    await redis.config_set("maxmemory", STORE_BYTES)
    try:
        yield world
    finally:
        await redis.config_set("maxmemory", 0)


async def used_bytes(world: World) -> int:
    memory: Any = await world.connections.commands.info("memory")
    return int(memory["used_memory"])


async def knows_the_store(gateway: Gateway) -> None:
    await eventually(lambda: gateway.client.store_memory.max_bytes == STORE_BYTES)


async def test_retained_records_omit_unused_megabytes(store: World, demo_model_dir: Path, tmp_path: Path) -> None:
    async with store.another_gateway(demo_model_dir, api_keys_file=write_keys(tmp_path, KEYS)) as gateway:
        before = await used_bytes(store)
        for _ in range(8):
            assert (await gateway.post(COMPLETIONS, {**SHORT, "user": "A" * 900_000}, **ONE))[0] == 200
        kept = {
            await store.connections.commands.hstrlen(key, "record")
            async for key in store.connections.commands.scan_iter("*:r:*")
        }
        assert max(kept) < 200 and await used_bytes(store) - before < 2 * 2**20


async def test_store_share_full_key_is_refused_others_are_not(
    store: World, demo_model_dir: Path, tmp_path: Path
) -> None:
    """Incompressible conversations at two gateways fill the share of one key."""
    keys_file, noise = write_keys(tmp_path, KEYS), random.Random(1)
    async with (
        store.another_gateway(demo_model_dir, api_keys_file=keys_file) as gateway,
        store.another_gateway(demo_model_dir, api_keys_file=keys_file) as other,
    ):
        await knows_the_store(gateway)
        await knows_the_store(other)
        before, refusals = await used_bytes(store), list[dict[str, Any]]()
        for _ in range(40):
            await store.beat()
            item = {"role": "user", "content": "x", "junk": noise.randbytes(200_000).hex()}
            body = {"input": [item], "max_output_tokens": 1}
            replies = await asyncio.gather(*(each.post("/v1/responses", body, **ONE) for each in (gateway, other)))
            refusals += [error["error"] for status, error in replies if status != 200]
        assert {(error["code"], error["type"]) for error in refusals} == {("store_share_exceeded", "rate_limit_error")}
        assert await used_bytes(store) - before < STORE_BYTES / 2 < STORE_BYTES * CLOSE_AT_RATIO
        async with other.session.post("/v1/responses", json=body, headers=ONE) as reply:
            assert reply.status == 429 and int(reply.headers["Retry-After"]) > 0
            assert json.loads(await reply.read())["error"]["param"] is None
        for each in (gateway, other):
            assert (await each.post(COMPLETIONS, {**SHORT, "detach_seconds": None}, **TWO))[0] == 200


async def test_store_share_refused_idempotency_name_is_free(store: World, demo_model_dir: Path, tmp_path: Path) -> None:
    keys_file = write_keys(tmp_path, KEYS)
    entries = keys_file.read_text()
    keys_file.write_text(entries.replace('name = "one"', 'name = "one"\nstore_ratio = 0.0001'))
    async with store.another_gateway(demo_model_dir, api_keys_file=keys_file) as gateway:
        await knows_the_store(gateway)
        assert (await gateway.post(COMPLETIONS, SHORT, **ONE))[0] == 200
        status, error = await gateway.post(COMPLETIONS, SHORT, Idempotency_Key="k", **ONE)
        assert (status, error["error"]["code"]) == (429, "store_share_exceeded")
        names = [key async for key in store.connections.commands.scan_iter("*:i:*")]
        assert len(names) == 1  # the account
    async with store.another_gateway(demo_model_dir, api_keys_file=write_keys(tmp_path, KEYS)) as gateway:
        await knows_the_store(gateway)
        assert (await gateway.post(COMPLETIONS, SHORT, Idempotency_Key="k", **ONE))[0] == 200
