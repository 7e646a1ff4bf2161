"""The table of store errors, row by row: as redis-py reports them, and at each caller in gateway and worker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.exceptions import RedisError, ResponseError

from engine_worker.transport.incarnation import Incarnation, register
from engine_worker.transport.reaper import Reaper
from gateway.store.inbox import Inbox
from gateway.store.inference_client import InferenceClient
from gateway.store.store_calls import StoreUnavailable
from gateway.work.owner_tasks import OwnerTasks
from shared import redis_client, store_errors
from shared.fleet_clock import FleetClock
from shared.messages import (
    ErrorCode,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    TokenEvent,
    Usage,
    encode,
)
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand, RedisScripts
from shared.store_errors import Outcome, StoreRefused, StoreRetry, rule_of
from shared.subscription import GAP, Subscription
from shared.tasks import cancel_and_wait
from tests.builders import make_request
from tests.conftest import Valkey
from tests.engine_worker.transport.presence import FixedPresence
from tests.inbox_reader import InboxReader
from tests.patience import PATIENCE_SECONDS
from tests.shared.resp_proxy import CLOSE, RespProxy

REFUSED, UNKNOWN, FINAL = Outcome.REFUSED, Outcome.UNKNOWN, Outcome.FINAL
ROWS = {
    CLOSE: UNKNOWN,
    "ERR max number of clients reached": UNKNOWN,
    "LOADING Redis is loading the dataset in memory": REFUSED,
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": REFUSED,
    "CLUSTERDOWN The cluster is down": REFUSED,
    "TRYAGAIN Multiple keys request during rehashing of slot": REFUSED,
    "OOM command not allowed when used memory > 'maxmemory'.": REFUSED,
    "MISCONF Errors writing to the AOF file: No space left on device": REFUSED,
    "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.": REFUSED,
    "NOREPLICAS Not enough good replicas to write.": REFUSED,
    "READONLY You can't write against a read only replica.": REFUSED,
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)": UNKNOWN,
    "ASK 3999 127.0.0.1:6381": REFUSED,
    "NOAUTH Authentication required.": REFUSED,
    "WRONGPASS invalid username-password pair or user is disabled.": REFUSED,
    "NOPERM User worker has no permissions to run the 'evalsha' command": REFUSED,
    "EXECABORT Transaction discarded because of previous errors.": REFUSED,
    "EXECABORT Transaction discarded because of: CROSSSLOT Keys don't hash to the same slot": FINAL,
    "MOVED 3999 127.0.0.1:6381": REFUSED,
    "CROSSSLOT Keys in request don't hash to the same slot": FINAL,
    "WRONGTYPE Operation against a key holding the wrong kind of value": FINAL,
    "ERR unknown command": FINAL,
}
CLOSING = [reply for reply in ROWS if reply.startswith(("READONLY", "UNBLOCKED", "MOVED"))]
each_row = pytest.mark.parametrize(("reply", "outcome"), ROWS.items(), ids=[reply.split()[0] for reply in ROWS])


@pytest.fixture(autouse=True)
def quick_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_errors, "MIN_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(redis_client, "RESET_SECONDS", 0.0)


@pytest.fixture
async def proxy(valkey: Valkey, connections: RedisConnections, keys: RedisKeys) -> AsyncIterator[RespProxy]:
    scripts = RedisScripts(connections.commands, keys)._scripts
    async with RespProxy(valkey.socket_path, script_names={script.sha: name for name, script in scripts.items()}) as it:
        yield it


@pytest.fixture
async def proxied(proxy: RespProxy) -> AsyncIterator[RedisConnections]:
    opened = connect(proxy.url)
    yield opened
    await opened.aclose()


@each_row
async def test_store_error_has_its_row(
    proxy: RespProxy, proxied: RedisConnections, reply: str, outcome: Outcome
) -> None:
    proxy.plan("PING", reply)
    with pytest.raises((RedisError, OSError)) as caught:
        await proxied.commands.ping()
    assert rule_of(caught.value).outcome is outcome
    assert rule_of(caught.value).closes_connections is (reply in CLOSING)


@pytest.mark.parametrize("reply", CLOSING)
async def test_store_demotion_resets_subscriber(proxy: RespProxy, proxied: RedisConnections, reply: str) -> None:
    subscription = Subscription(proxied.subscriber, ["channel"])
    try:
        assert await subscription.get(PATIENCE_SECONDS) is GAP
        proxy.plan("PING", reply)
        with pytest.raises(RedisError):
            await proxied.commands.ping()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await subscription.get(PATIENCE_SECONDS) is not GAP:
                pass
        assert await proxied.commands.ping()
    finally:
        await subscription.aclose()


class TestRetry:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    def test_retry_delays_double_up_to_a_second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_errors, "MIN_BACKOFF_SECONDS", 0.1)
        retry = StoreRetry()
        delays = [retry.delay_after(ResponseError("NOREPLICAS")) for _ in range(6)]
        assert delays == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
        retry.succeeded()
        assert retry.delay_after(ResponseError("NOREPLICAS")) == 0.1

    @pytest.mark.parametrize("reply", ["NOAUTH", "WRONGPASS", "NOPERM"])
    def test_retry_wrong_credentials_at_start_are_final(self, reply: str) -> None:
        with pytest.raises(StoreRefused, match=reply):
            StoreRetry().delay_after(ResponseError(reply))

    @pytest.mark.parametrize("reply", ["NOAUTH", "WRONGPASS", "NOPERM"])
    def test_retry_wrong_credentials_while_running_may_rotate(self, reply: str) -> None:
        clock = self.Clock()
        retry = StoreRetry(has_succeeded=True, clock=clock)
        for clock.now in (0.0, 59.0):
            retry.delay_after(ResponseError(reply))
        clock.now = 60.0
        with pytest.raises(StoreRefused, match=reply):
            retry.delay_after(ResponseError(reply))

    def test_retry_another_error_resets_credential_time(self) -> None:
        clock = self.Clock()
        retry = StoreRetry(has_succeeded=True, clock=clock)
        retry.delay_after(ResponseError("NOAUTH"))
        clock.now = 59.0
        retry.delay_after(ConnectionError())
        clock.now = 61.0
        retry.delay_after(ResponseError("NOAUTH"))

    def test_retry_replica_is_refused_only_at_start(self) -> None:
        clock = self.Clock()
        retry = StoreRetry(clock=clock)
        retry.delay_after(ResponseError("READONLY"))
        clock.now = store_errors.REPLICA_AT_START_SECONDS
        with pytest.raises(StoreRefused, match="address of the primary"):
            retry.delay_after(ResponseError("READONLY"))
        retry.succeeded()
        retry.delay_after(ResponseError("READONLY"))
        clock.now += 3600.0
        retry.delay_after(ResponseError("READONLY"))


Arm = Callable[[str], None]  # makes the next command or script of this name fail


class Parts:
    """An incarnation of a worker and a gateway's client, both connected to the proxy."""

    def __init__(self, connections: RedisConnections, keys: RedisKeys, incarnation: Incarnation) -> None:
        self.connections = connections
        self.keys = keys
        self.incarnation = incarnation
        self.scripts = RedisScripts(connections.commands, keys)
        self.owners = OwnerTasks()
        self.client = InferenceClient(connections, keys, "g", quiet_seconds=0.02)

    async def accept(self, request: GenerationRequest) -> None:
        body = encode(request)
        await self.scripts.accept(request.request_id, body, gateway_id="g", priority_class="interactive")

    async def claimed(self) -> str:
        """Return the id of a new request that the worker has claimed."""
        request = make_request(3)
        await self.accept(request)
        (claimed,) = await self.incarnation.requests.claim(Demand(1))
        return claimed.request.request_id

    async def finish(self, request_id: str, num_tokens: int = 0) -> None:
        event = FinishEvent(request_id, FinishReason.STOP, Usage(prompt_tokens=3, completion_tokens=num_tokens))
        await self.incarnation.tokens.finish([event])
        assert await self.scripts.redis.hget(self.keys.request(request_id), "state") == b"done"


@pytest.fixture
async def parts(proxied: RedisConnections, keys: RedisKeys, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Parts]:
    monkeypatch.setattr("shared.fleet_clock.TICK_SECONDS", 0.02)
    monkeypatch.setattr("gateway.store.recovery.TICK_SECONDS", 0.02)
    monkeypatch.setattr("engine_worker.transport.request_stream.BLOCK_SECONDS", 0.02)
    parts = Parts(proxied, keys, await register(proxied, keys, "w"))
    yield parts
    await parts.client.close()


@pytest.fixture
def arm(proxy: RespProxy, reply: str) -> Arm:
    return lambda command: proxy.plan(command, reply)


async def registering(parts: Parts, arm: Arm) -> None:
    arm("register")
    await register(parts.connections, parts.keys, "w", parts.incarnation)


async def taking(parts: Parts, arm: Arm) -> None:
    await parts.accept(make_request(3))
    arm("take")
    assert await parts.incarnation.requests.claim(Demand(1)) == []
    await claimed_in_the_end(parts)


async def claiming(parts: Parts, arm: Arm) -> None:
    await parts.accept(make_request(3))
    arm("claim")
    assert await parts.incarnation.requests.claim(Demand(1)) == []
    await claimed_in_the_end(parts)


async def reading(parts: Parts, arm: Arm) -> None:
    arm("XREADGROUP")
    assert await parts.incarnation.requests.claim(Demand(1), block=True) == []
    await parts.accept(make_request(3))
    await claimed_in_the_end(parts)


async def claimed_in_the_end(parts: Parts) -> None:
    """Claim with retries, because a connection reset may fail further reads."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await parts.incarnation.requests.claim(Demand(1), block=True):
            pass


async def emitting(parts: Parts, arm: Arm) -> None:
    request_id = await parts.claimed()
    arm("emit")
    assert await parts.incarnation.tokens.emit([TokenEvent(request_id, 0, [5])]) == []
    await parts.finish(request_id, 1)


async def finishing(parts: Parts, arm: Arm) -> None:
    request_id = await parts.claimed()
    arm("finish")
    await parts.finish(request_id)


async def giving_back(parts: Parts, arm: Arm) -> None:
    request_id = await parts.claimed()
    arm("unclaim")
    await parts.incarnation.requests.unclaim([request_id])
    assert parts.incarnation.requests.num_held == 0


async def sharing(parts: Parts, arm: Arm) -> None:
    arm("level")
    assert await parts.incarnation.requests.peers_level(1) is None


async def handing_back(parts: Parts, arm: Arm) -> None:
    await parts.claimed()
    arm("XPENDING")
    await parts.incarnation.requests.hand_back_within(PATIENCE_SECONDS)
    assert await parts.scripts.redis.xlen(parts.keys.queue("resumed")) == 1


async def reaping(parts: Parts, arm: Arm) -> None:
    reaper = Reaper(parts.connections, parts.keys, FixedPresence())
    await reaper.tick(could_hear=True)
    arm("EXISTS")
    await reaper.tick(could_hear=True)
    await reaper.tick(could_hear=True)


async def ticking(parts: Parts, arm: Arm) -> None:
    clock = FleetClock(parts.scripts.tick)
    await clock.tick()
    arm("tick")
    running = asyncio.create_task(clock.run())
    await asyncio.wait([running], timeout=0.1)
    await cancel_and_wait([running])
    if not running.cancelled():
        running.result()


WORKER_CALLERS = [
    registering, taking, claiming, reading, emitting, finishing, giving_back, sharing, handing_back, reaping, ticking
]  # fmt: skip


@each_row
@pytest.mark.parametrize("caller", WORKER_CALLERS)
async def test_worker_retries_unless_error_is_final(
    parts: Parts, arm: Arm, proxy: RespProxy, caller: Callable[[Parts, Arm], Awaitable[None]], outcome: Outcome
) -> None:
    if outcome is FINAL:
        with pytest.raises((StoreRefused, ResponseError)):
            await caller(parts, arm)
    else:
        await caller(parts, arm)
    assert proxy.num_faults == 1


@each_row
async def test_submission_is_retried_without_reply_or_at_another_server(
    parts: Parts, arm: Arm, proxy: RespProxy, reply: str, outcome: Outcome
) -> None:
    arm("accept")
    if outcome is UNKNOWN or reply in CLOSING:
        await parts.client.submission.submit(make_request(3))
    else:
        with pytest.raises(StoreUnavailable):
            await parts.client.submission.submit(make_request(3))
    assert proxy.num_faults == 1


@each_row
async def test_journal_read_is_retried_unless_final(parts: Parts, arm: Arm, proxy: RespProxy, outcome: Outcome) -> None:
    """A final error ends only this stream."""
    await parts.client.start(parts.owners)
    stream = await parts.client.submission.submit(make_request(3))
    claims = await parts.incarnation.requests.claim(Demand(1))
    await parts.scripts.redis.hdel(parts.keys.request(stream.request_id), "gateway")  # suppresses token events
    arm("HMGET")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not proxy.num_faults:
            await asyncio.sleep(0.01)
    assert len(claims) == 1
    await parts.incarnation.tokens.emit([TokenEvent(stream.request_id, 0, [5])])
    async with asyncio.timeout(PATIENCE_SECONDS):
        event = await anext(InboxReader(stream))
    if outcome is FINAL:
        assert isinstance(event, ErrorEvent) and event.code is ErrorCode.REQUEST_FAILED
    else:
        assert event == TokenEvent(stream.request_id, 0, [5])
    assert not parts.owners.failed.is_set()


@each_row
async def test_cancel_is_retried_unless_refused(parts: Parts, arm: Arm, proxy: RespProxy, outcome: Outcome) -> None:
    await parts.client.start(parts.owners)
    stream = await parts.client.submission.submit(make_request(3))
    arm("cancel")
    await parts.client.submission.release(stream)
    other = await parts.client.submission.submit(make_request(3))
    await parts.client.submission.release(other)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await is_stored(parts, other) or (outcome is not FINAL and await is_stored(parts, stream)):
            await asyncio.sleep(0.01)
    assert proxy.num_faults == 1 and not parts.owners.failed.is_set()


async def is_stored(parts: Parts, stream: Inbox) -> bool:
    return bool(await parts.scripts.redis.exists(parts.keys.request(stream.request_id)))


@pytest.mark.parametrize("reply", ROWS)
@pytest.mark.parametrize("command", ["INFO", "SET", "SUBSCRIBE"])
async def test_gateway_watches_survive_any_error(parts: Parts, arm: Arm, proxy: RespProxy, command: str) -> None:
    arm(command)
    await parts.client.start(parts.owners)
    async with parts.client.kv.into(asyncio.Queue()), asyncio.timeout(PATIENCE_SECONDS):
        while not proxy.num_faults:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)  # gives a failing owner time to end
    assert not parts.owners.failed.is_set()


@each_row
async def test_gateway_ends_on_final_store_error(parts: Parts, arm: Arm, proxy: RespProxy, outcome: Outcome) -> None:
    await parts.client.start(parts.owners)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await parts.client.probe.fleet_seconds()
        arm("tick")
        while not proxy.num_faults:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)  # gives a failing owner time to end
    assert parts.owners.failed.is_set() is (outcome is FINAL)
