"""The account of each API key in the store: counted by ACCEPT, limited, and corrected after losses."""

import asyncio
import random

import pytest
from redis.asyncio import Redis

from shared.new_requests import NewRequest, RetentionTerms, Share
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import ACCOUNT_SECONDS, BARE_REQUEST_BYTES, AcceptStatus, Demand, Ending, RedisScripts
from tests.conftest import Valkey

BODY_BYTES = 1000
OF_ONE = BODY_BYTES + BARE_REQUEST_BYTES
WORKER = "w.1"


@pytest.fixture
def redis(connections: RedisConnections) -> Redis:
    return connections.commands


class Owner:
    """A key that may hold a number of requests of BODY_BYTES each."""

    def __init__(self, scripts: RedisScripts, max_requests: float, name: str = "owner") -> None:
        self.scripts = scripts
        self.share = Share(name, int(max_requests * OF_ONE))

    async def accept(self, *request_ids: str, reserved_bytes: int = 0, journal: bytes = b"") -> AcceptStatus:
        requests = [
            NewRequest(request_id, bytes(BODY_BYTES), journal, reserved_bytes=reserved_bytes)
            for request_id in request_ids
        ]
        return await self.scripts.accept_all(requests, gateway_id="g", priority_class="interactive", share=self.share)

    async def num_bytes(self) -> int:
        return int(await self.scripts.redis.hget(self.key, "bytes") or 0)

    @property
    def key(self) -> str:
        return self.scripts.keys.account(self.share.owner_key_hash)

    async def end(self, *request_ids: str, tokens: bytes = b"") -> None:
        """End these requests in the given order, as a worker does."""
        await self.scripts.register(WORKER)
        taken = await self.scripts.take(WORKER, Demand(10_000))
        entries = {entry.request_id: entry for entry in taken.entries}
        await self.scripts.claim(WORKER, list(entries.values()))
        for request_id in request_ids:
            await self.scripts.redis.append(self.scripts.keys.journal(request_id), tokens)
            entry = entries[request_id]
            await self.scripts.finish(WORKER, [Ending(request_id, entry.queue, entry.entry_id, b"end")], [])

    async def expire(self, *request_ids: str) -> None:
        for request_id in request_ids:
            await self.scripts.redis.unlink(
                self.scripts.keys.request(request_id), self.scripts.keys.journal(request_id)
            )


async def test_account_full_key_is_refused_and_others_are_not(scripts: RedisScripts, redis: Redis) -> None:
    owner, other = Owner(scripts, 3), Owner(scripts, 3, "other")
    assert [await owner.accept(name) for name in "abcd"] == [AcceptStatus.OK] * 3 + [AcceptStatus.FULL]
    assert await owner.num_bytes() == 3 * OF_ONE
    assert not await redis.exists(scripts.keys.request("d"), scripts.keys.journal("d"))
    assert await redis.xlen(scripts.keys.queue("interactive")) == 3
    assert await owner.accept("a") is AcceptStatus.DUP and await owner.num_bytes() == 3 * OF_ONE
    assert await other.accept("d") is AcceptStatus.OK


async def test_account_requests_of_one_body_count_together(scripts: RedisScripts) -> None:
    owner = Owner(scripts, 3)
    await owner.accept("a")
    assert await owner.accept("b", "c", "d") is AcceptStatus.FULL
    assert await owner.accept("b", "c") is AcceptStatus.OK
    assert await owner.num_bytes() == 3 * OF_ONE


async def test_account_single_oversized_request_is_accepted(scripts: RedisScripts) -> None:
    owner = Owner(scripts, 0.5)
    assert [await owner.accept(name) for name in "ab"] == [AcceptStatus.OK, AcceptStatus.FULL]
    await owner.expire("a")
    assert await owner.accept("b") is AcceptStatus.OK


async def test_account_expired_requests_make_room(scripts: RedisScripts) -> None:
    """Expired, cancelled, or forgotten requests do not notify the account."""
    owner = Owner(scripts, 40)
    names = [f"{number}" for number in range(40)]
    assert {await owner.accept(name) for name in names} == {AcceptStatus.OK}
    assert await owner.accept("more") is AcceptStatus.FULL
    await owner.expire(*names[10:30])
    assert [await owner.accept(f"new-{n}") for n in range(21)] == [AcceptStatus.OK] * 20 + [AcceptStatus.FULL]
    assert await owner.num_bytes() == 40 * OF_ONE


async def test_account_ended_request_counts_its_actual_size(scripts: RedisScripts) -> None:
    owner = Owner(scripts, 10)
    assert await owner.accept("a", reserved_bytes=9 * OF_ONE) is AcceptStatus.OK
    assert await owner.accept("b") is AcceptStatus.FULL
    await owner.end("a", tokens=bytes(500))
    assert await owner.accept("b") is AcceptStatus.OK
    assert await owner.num_bytes() == 2 * OF_ONE + 500


async def test_account_journal_counts_beyond_reserved_bytes(scripts: RedisScripts, redis: Redis) -> None:
    """Journals are measured when the limit is near and with every sixteenth request of the key."""
    owner = Owner(scripts, 100)
    await owner.accept("a", reserved_bytes=100)
    await redis.append(scripts.keys.journal("a"), bytes(90 * OF_ONE))
    assert {await owner.accept(f"{number}") for number in range(15)} == {AcceptStatus.OK}
    assert await owner.accept("more") is AcceptStatus.FULL
    assert await owner.num_bytes() == 106 * OF_ONE


async def test_account_erased_response_counts_as_bare_request(scripts: RedisScripts, redis: Redis) -> None:
    owner = Owner(scripts, 2.5)
    await owner.accept("a", "b")
    await redis.hdel(scripts.keys.request("a"), "body", "record", "owner")
    assert await owner.accept("c") is AcceptStatus.FULL
    await redis.hdel(scripts.keys.request("b"), "body", "record", "owner")
    assert await owner.accept("c") is AcceptStatus.OK
    assert await owner.num_bytes() == OF_ONE + 2 * BARE_REQUEST_BYTES


async def test_account_busy_queue_counts_nothing(scripts: RedisScripts) -> None:
    owner = Owner(scripts, 10)
    await owner.accept("a")
    new = NewRequest("b", bytes(BODY_BYTES))
    accepted = scripts.accept_all([new], gateway_id="g", priority_class="interactive", max_queued=1, share=owner.share)
    assert await accepted is AcceptStatus.BUSY
    assert await owner.num_bytes() == OF_ONE


async def test_account_retention_record_counts(scripts: RedisScripts) -> None:
    owner = Owner(scripts, 10)
    new = NewRequest("a", b"", terms=RetentionTerms(bytes(777), "h"))
    await scripts.accept_all([new], gateway_id="g", priority_class="interactive", share=owner.share)
    assert await owner.num_bytes() == 777 + BARE_REQUEST_BYTES


async def test_account_concurrent_gateways_stay_within_limit(valkey: Valkey, keys: RedisKeys) -> None:
    """Each gateway has its own connection; they must not use the same room twice."""
    opened = [connect(valkey.url) for _ in range(4)]
    try:
        owners = [Owner(RedisScripts(connections.commands, keys), 50) for connections in opened]
        replies = await asyncio.gather(*(owners[n % 4].accept(f"{n}") for n in range(200)))
        assert replies.count(AcceptStatus.OK) == 50 and replies.count(AcceptStatus.FULL) == 150
    finally:
        for connections in opened:
            await connections.aclose()
        await asyncio.sleep(0)  # lets the transports of closed connections report their close to the loop


@pytest.mark.parametrize("seed", range(3))
async def test_account_random_histories_never_undercount(scripts: RedisScripts, redis: Redis, seed: int) -> None:
    """The account never counts less than exists. After it was full it is exact, because it has measured everything."""
    chance, owner = random.Random(seed), Owner(scripts, 30)
    there: list[str] = []
    ended: set[str] = set()
    for number in range(400):
        name = f"{number}"
        status = await owner.accept(name, reserved_bytes=chance.choice([0, 0, OF_ONE]))
        if status is AcceptStatus.OK:
            there.append(name)
        actual = sum([OF_ONE + await redis.strlen(scripts.keys.journal(held)) for held in there])
        assert await owner.num_bytes() >= actual
        assert status is AcceptStatus.OK or len(there) > 10
        if chance.random() < 0.5 and (running := [held for held in there if held not in ended]):
            ended.add(name := chance.choice(running))
            await redis.hset(scripts.keys.request(name), "state", "done")
        while there and chance.random() < 0.5:
            await owner.expire(there.pop(chance.randrange(len(there))))
    await owner.expire(*there)
    await owner.accept("last")
    for number in range(400):  # some of these measure the oldest requests
        await owner.accept(f"last-{number}")
        await owner.expire(f"last-{number}")
    assert await owner.num_bytes() <= 33 * OF_ONE
    assert await redis.hlen(owner.key) <= 3 + 32


async def test_account_expires_when_its_key_is_silent(scripts: RedisScripts, redis: Redis) -> None:
    owner = Owner(scripts, 3)
    await owner.accept("a")
    assert ACCOUNT_SECONDS - 5 < await redis.ttl(owner.key) <= ACCOUNT_SECONDS


async def test_account_without_share_is_not_created(scripts: RedisScripts, redis: Redis) -> None:
    await scripts.accept("a", b"x", gateway_id="g", priority_class="interactive")
    assert not [key async for key in redis.scan_iter("*:i:*")]
