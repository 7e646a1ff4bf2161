"""Admission closes before the store's memory is full, and opens again below a lower threshold."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.store.store_probe import StoreMemory
from shared.redis_client import RedisConnections
from shared.tasks import cancel_and_wait
from tests.gateway.conftest import Gateway
from tests.patience import PATIENCE_SECONDS


def test_admission_near_the_threshold_does_not_flap() -> None:
    memory = StoreMemory()
    seen = []
    for used in (0, 74, 75, 99, 70, 69, 74, 75):
        memory.update(used, 100)
        seen.append(memory.has_room)
    assert seen == [True, True, False, False, False, True, True, False]


def test_store_without_maxmemory_is_limited_by_its_machine(caplog: pytest.LogCaptureFixture) -> None:
    memory = StoreMemory()
    for used, has_room in ((74, True), (75, False), (70, False), (69, True)):
        memory.update(used * 2**30, 0, 100 * 2**30)
        assert (memory.has_room, memory.used_ratio) == (has_room, used / 100)
    (warning,) = caplog.records  # once
    assert "maxmemory is not set: admission closes at 75% of the machine's 100.0 GiB" in warning.getMessage()
    memory.update(76, 100, 10**12)
    assert not memory.has_room


def test_store_without_any_limit_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    memory = StoreMemory()
    memory.update(10**12, 0)
    assert (memory.has_room, memory.used_ratio) == (True, 0.0)
    assert "admission never closes" in caplog.text


async def test_real_store_reports_the_memory_of_its_machine(connections: RedisConnections) -> None:
    memory = StoreMemory()
    watch = asyncio.create_task(memory.watch(connections.commands))
    await until(lambda: memory.used_ratio > 0)
    assert 0 < memory.used_ratio < 0.5
    await cancel_and_wait([watch])


@pytest.fixture
async def limited(connections: RedisConnections) -> AsyncIterator[RedisConnections]:
    yield connections
    await connections.commands.config_set("maxmemory", 0)


async def test_real_store_closes_and_opens_admission(limited: RedisConnections) -> None:
    redis = limited.commands
    memory = StoreMemory()
    watch = asyncio.create_task(memory.watch(redis))
    used = int((await redis.info("memory"))["used_memory"])
    limit = used + 32 * 2**20
    await redis.config_set("maxmemory", limit)
    await redis.setrange("ballast", limit * 8 // 10 - used, b"x")  # allocated there: sending it would fill buffers too
    await until(lambda: not memory.has_room)
    assert 0.75 <= memory.used_ratio < 1
    await redis.delete("ballast")
    await until(lambda: memory.has_room)
    await cancel_and_wait([watch])


async def test_full_store_refuses_before_the_body_is_read(start_gateway: Callable[..., Any]) -> None:
    gateway: Gateway = await start_gateway()
    gateway.engine.store_memory.update(80, 100)
    async with gateway.session.post("/v1/completions", json={"prompt": "the end"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "5")
        assert (await response.json())["error"]["code"] == "store_full"
    assert gateway.engine.requests == []


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await asyncio.sleep(0.02)  # polls another process: there is no event to wait for
