"""Requests whose gateway is gone, on a real server: how long they live and what keeps them alive."""

import pytest

from engine_worker.transport import orphans as module
from engine_worker.transport.orphans import Orphans
from shared.messages import FinishEvent, FinishReason, decode_terminal_event
from shared.new_requests import RetentionTerms
from shared.redis_keys import RESUMED
from shared.redis_scripts import Demand, RedisScripts, StepFrame
from tests.patience import PATIENCE_SECONDS

WORKER = "w0.aaaa"


@pytest.fixture
def orphans(scripts: RedisScripts) -> Orphans:
    return Orphans(scripts, tick_seconds=1.0)


async def accept(scripts: RedisScripts, request_id: str = "a", *, gateway_id: str = "gone", terms=None) -> None:
    await scripts.accept(request_id, b"body", gateway_id=gateway_id, priority_class="interactive", terms=terms)


async def ticks(orphans: Orphans, count: int) -> None:
    for _ in range(count):
        await orphans.tick()


async def test_orphan_ends_one_minute_after_its_gateway(orphans, scripts, keys, connections):
    await accept(scripts)
    await ticks(orphans, 60)
    assert await connections.commands.exists(keys.request("a"))
    await orphans.tick()
    assert not await connections.commands.exists(keys.request("a"))
    assert await connections.commands.xlen(keys.queue("interactive")) == 0 and orphans.faults.num_ended == 1


async def test_orphan_does_not_end_while_gateway_is_subscribed(orphans, scripts, keys, connections):
    await accept(scripts, terms=RetentionTerms(b"r", "h", grace_seconds=2))
    async with connections.subscriber.pubsub() as gateway:
        await ticks(orphans, 2)
        await gateway.subscribe(keys.gateway_channel("gone"))
        await gateway.get_message(timeout=PATIENCE_SECONDS)
        await ticks(orphans, 3)  # the count restarts
    await ticks(orphans, 2)
    assert await connections.commands.hget(keys.request("a"), "state") == b"queued"


async def test_orphan_running_is_cancelled_and_retained_with_end(orphans, scripts, keys, connections):
    await accept(scripts, terms=RetentionTerms(b"r", "h", grace_seconds=2))
    await scripts.register(WORKER)
    (entry,) = (await scripts.take(WORKER, Demand(1))).entries
    await scripts.claim(WORKER, [entry])
    await ticks(orphans, 3)
    assert await scripts.emit(WORKER, 1, [StepFrame("a", entry.entry_id, b"x")], []) == ["a"]
    state, terminal = await connections.commands.hmget(keys.request("a"), "state", "terminal")
    end = decode_terminal_event(terminal)
    assert state == b"done" and isinstance(end, FinishEvent) and end.reason is FinishReason.CANCELLED
    assert 0 < await connections.commands.ttl(keys.request("a")) <= 600


async def test_orphan_with_another_holder_is_kept(orphans, scripts, keys, connections):
    await accept(scripts, gateway_id="alive", terms=RetentionTerms(b"r", "h0", grace_seconds=2))
    await scripts.attach("a", "h1", "gone")
    async with connections.subscriber.pubsub() as gateway:
        await gateway.subscribe(keys.gateway_channel("alive"))
        await gateway.get_message(timeout=PATIENCE_SECONDS)
        await ticks(orphans, 9)
        assert await connections.commands.hget(keys.request("a"), "state") == b"queued"
        assert await connections.commands.hget(keys.request("a"), "h:h1") is None
    await ticks(orphans, 4)
    assert await connections.commands.hget(keys.request("a"), "state") == b"done"


async def test_orphans_every_page_of_every_queue_is_checked(orphans, scripts, keys, connections, monkeypatch):
    monkeypatch.setattr(module, "PAGE_ENTRIES", 2)
    for number in range(5):
        await accept(scripts, f"r{number}", terms=RetentionTerms(b"r", "h", grace_seconds=0))
    entry = await connections.commands.xadd(keys.queue(RESUMED), {"r": "half", "a": "2", "s": "0"})
    fields = {"body": "x", "state": "queued", "gateway": "gone", "class": "batch", "grace": 0, "entry": entry}
    await connections.commands.hset(keys.request("half"), mapping=fields)
    await ticks(orphans, 3)  # one full page in each
    assert orphans.faults.num_ended == 6


async def test_orphans_of_a_long_queue_are_read_in_larger_steps(orphans, scripts, monkeypatch):
    monkeypatch.setattr(module, "PAGE_ENTRIES", 2)
    for number in range(64):  # 32 pages, for eight ticks
        await accept(scripts, f"r{number}", terms=RetentionTerms(b"r", "h", grace_seconds=0))
    await orphans.tick()
    assert orphans.faults.num_ended == 10  # five pages
    await ticks(orphans, 30)  # the rest is shorter, and is read slower
    assert orphans.faults.num_ended == 64


async def test_orphans_requests_without_gateway_are_ignored(orphans, scripts, keys, connections):
    await accept(scripts, gateway_id="")
    await connections.commands.set(keys.request("b"), "not a hash")
    await connections.commands.xadd(keys.queue("batch"), {"r": "b"})
    await ticks(orphans, 70)
    assert orphans.faults.num_ended == 0
