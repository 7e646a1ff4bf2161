"""Limits per minute of one API key over several gateways, on a real server."""

import asyncio
from typing import Any

import pytest

from gateway.auth.api_keys import ApiKey
from gateway.auth.rate_limits import Account
from gateway.errors import RateLimited
from gateway.store.shared_limits import SharedLimits
from gateway.store.store_calls import StoreCalls
from shared.fleet_clock import FleetClock
from shared.redis_client import connect
from shared.redis_scripts import RedisScripts

NUM_GATEWAYS = 3


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Gateway:
    def __init__(self, scripts: RedisScripts, key: ApiKey, clock: Clock) -> None:
        self.fleet_clock = FleetClock(scripts.tick, clock)
        self.limits = SharedLimits(scripts, self.fleet_clock, StoreCalls())
        self.account = Account(key, clock)

    async def begins(self, *, generates: bool = True) -> str:
        """Return "" if a request begins, else the code of its refusal."""
        try:
            self.account.begin(generates=generates)
            await self.limits.begin(self.account, generates=generates)
        except RateLimited as refusal:
            return refusal.code
        return ""


@pytest.fixture
def clock() -> Clock:
    return Clock()


def gateways(scripts: RedisScripts, clock: Clock, **limits: Any) -> list[Gateway]:
    key = ApiKey(name="a", sha256="0" * 64, **limits)
    return [Gateway(scripts, key, clock) for _ in range(NUM_GATEWAYS)]


async def pass_time(all_gateways: list[Gateway], clock: Clock, seconds: float) -> None:
    clock.now += seconds
    for gateway in all_gateways:
        await gateway.fleet_clock.tick()


async def test_requests_are_limited_over_all_gateways(scripts: RedisScripts, clock: Clock) -> None:
    three = gateways(scripts, clock, requests_per_minute=60)
    found = await asyncio.gather(*(gateway.begins() for _ in range(40) for gateway in three))
    assert found.count("") == 60 and set(found) == {"", "requests_per_minute_exceeded"}
    await pass_time(three, clock, 10.0)
    found = await asyncio.gather(*(gateway.begins() for _ in range(10) for gateway in three))
    assert found.count("") == 10


async def test_refused_request_costs_nothing(scripts: RedisScripts, clock: Clock) -> None:
    three = gateways(scripts, clock, requests_per_minute=2)
    assert [await three[0].begins(), await three[0].begins()] == ["", ""]
    assert [await three[1].begins() for _ in range(5)] == ["requests_per_minute_exceeded"] * 5
    await pass_time(three, clock, 30.0)
    assert await three[1].begins() == ""


async def test_tokens_of_one_gateway_are_a_debt_at_the_others(scripts: RedisScripts, clock: Clock) -> None:
    three = gateways(scripts, clock, tokens_per_minute=600)
    assert await three[0].begins() == ""
    charge = three[0].account.reserve(500, 1_000, lambda: 700)
    assert charge is not None
    sharing = asyncio.create_task(three[0].limits.share(lambda: [three[0].account]))
    async with asyncio.timeout(10):
        while await three[1].begins() == "":
            await asyncio.sleep(0.05)  # until the first gateway's next half second
    sharing.cancel()
    assert await three[1].begins() == "tokens_per_minute_exceeded"
    assert await three[1].begins(generates=False) == ""  # states can be read
    charge.settle()
    assert await three[0].begins() == "tokens_per_minute_exceeded"  # 700 of 600
    await pass_time(three, clock, 11.0)
    assert await three[2].begins() == ""
    three[2].account.reserve(0, 1_000, lambda: 0)  # it takes the ten tokens that all of them have left
    assert await three[2].begins() == "tokens_per_minute_exceeded"


async def test_unused_reserve_returns_to_all(scripts: RedisScripts, clock: Clock) -> None:
    three = gateways(scripts, clock, tokens_per_minute=600)
    assert await three[0].begins() == ""
    charge = three[0].account.reserve(100, 500, lambda: 150)
    assert charge is not None
    assert await three[0].begins() == "tokens_per_minute_exceeded"  # it tells the others
    charge.settle()
    await three[0].begins()
    assert await three[1].begins() == ""


async def test_without_store_each_gateway_counts_alone(keys, tmp_path, clock: Clock) -> None:
    away = connect(f"unix://{tmp_path}/no-server")
    try:
        three = gateways(RedisScripts(away.commands, keys), clock, requests_per_minute=2)
        assert [await three[0].begins() for _ in range(3)] == ["", "", "requests_per_minute_exceeded"]
    finally:
        await away.aclose()


async def test_account_of_a_silent_key_expires(scripts: RedisScripts, keys, clock: Clock) -> None:
    (gateway, *_) = gateways(scripts, clock, requests_per_minute=2)
    await gateway.begins()
    assert 0 < await scripts.redis.ttl(keys.limits("0" * 64)) <= 120
