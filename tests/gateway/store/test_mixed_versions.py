"""A new gateway with a manually driven worker of commit 101a539: new fields are obeyed or refused, never ignored.

`make faults-versions` runs the same cases with the real worker of that commit.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.store.inference_client import InferenceClient
from gateway.store.store_calls import NeedsNewerWorker
from shared.capabilities import NEEDS_NEWER_MESSAGE, SUPPORTED
from shared.messages import (
    ErrorCode,
    ErrorEvent,
    GenerationRequest,
    SamplingParams,
    WorkerHeartbeat,
    WorkerPhase,
    decode_request,
    encode,
)
from shared.new_requests import RetentionTerms
from shared.redis_keys import GROUP, INTERACTIVE, NEWER, PRIORITY_CLASSES, RESUMED
from shared.redis_scripts import Ending, RedisScripts, gateway_message, queue_entry
from tests.gateway.store.conftest import HandPlayedWorker, num_waiting, rest
from tests.patience import PATIENCE_SECONDS

OLD_WORKER = "old.aaaa"
TERMS = RetentionTerms(b"record", "holder")


class OldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request body as that commit declares it; unknown fields are ignored."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: dict[str, Any]


class OldWorker:
    """A worker that reads three queues without comparing requirements."""

    def __init__(self, scripts: RedisScripts) -> None:
        self.scripts = scripts
        self.num_refused = 0

    async def serve_once(self) -> list[str]:
        """Claim waiting entries, refuse unreadable ones as request_stream.py did, and return what it would run."""
        redis, keys = self.scripts.redis, self.scripts.keys
        queues = [keys.queue(name) for name in (RESUMED, *PRIORITY_CLASSES)]
        await redis.set(keys.fence(OLD_WORKER), 0, nx=True)
        for queue in queues:
            await redis.xgroup_createconsumer(queue, GROUP, OLD_WORKER)
        streams: dict[Any, Any] = dict.fromkeys(queues, ">")
        reply: Any = await redis.xreadgroup(GROUP, OLD_WORKER, streams, count=10)
        entries = [queue_entry(queue, entry_id, fields) for queue, found in reply for entry_id, fields in found]
        begun = []
        for entry in entries:
            (claim,) = await self.scripts.claim(OLD_WORKER, [entry])
            assert claim is not None
            try:
                msgspec.msgpack.decode(claim.body, type=OldRequest)
                begun.append(entry.request_id)
            except msgspec.ValidationError:
                self.num_refused += 1
                event = ErrorEvent(entry.request_id, ErrorCode.REQUEST_FAILED, "the stored request is unreadable")
                message = gateway_message(claim.gateway_id, OLD_WORKER, 0, [event], {entry.request_id: 0})
                ending = Ending(entry.request_id, entry.queue, entry.entry_id, encode(event))
                await self.scripts.finish(OLD_WORKER, [ending], [message])
        return begun


@pytest.fixture
def old_worker(scripts: RedisScripts) -> OldWorker:
    return OldWorker(scripts)


@pytest.fixture
async def new_worker(scripts: RedisScripts, worker: HandPlayedWorker) -> HandPlayedWorker:
    assert await worker.claim() == []  # it creates the groups
    return worker


def is_ready(client: InferenceClient, *, capabilities: int, max_model_len: int = 4096) -> None:
    worker_id = f"w{capabilities}-{max_model_len}.a"
    client.fleet.record_heartbeat(
        WorkerHeartbeat(
            worker_id=worker_id, phase=WorkerPhase.READY, capabilities=capabilities, max_model_len=max_model_len
        )
    )


def needy(request_id: str = "a", **sampling: Any) -> GenerationRequest:
    sampling = {"allowed_token_ids": (504, 253), **sampling}
    params = SamplingParams(max_tokens=9, seed=0, **sampling)
    return GenerationRequest(request_id=request_id, prompt_token_ids=[1, 2], sampling=params)


async def claimed(worker: HandPlayedWorker) -> list[str]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (found := await worker.claim()):
            await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("terms", [None, TERMS])
async def test_known_old_worker_never_gets_requests_with_needs(client, old_worker, new_worker, terms) -> None:
    is_ready(client, capabilities=0)
    is_ready(client, capabilities=SUPPORTED)
    stream = await client.submission.submit(needy(), terms=terms)
    plain = await client.submission.submit(needy("b", allowed_token_ids=None))
    assert await old_worker.serve_once() == ["b"]
    assert old_worker.num_refused == 0
    assert await new_worker.claim() == ["a"]
    await new_worker.emit("a", 0, 504)
    end = await new_worker.finish("a", 1)
    assert await rest(stream) == ([504], end)
    await client.submission.release(plain)


@pytest.mark.parametrize("terms", [None, TERMS])
@pytest.mark.parametrize("sampling", [{}, {"allowed_token_ids": None, "bad_words": ((7,),)}])
async def test_refusal_by_an_unknown_old_worker_is_retried(client, old_worker, new_worker, terms, sampling) -> None:
    stream = await client.submission.submit(needy(**sampling), terms=terms)
    assert await old_worker.serve_once() == []
    assert old_worker.num_refused == 1
    assert await claimed(new_worker) == ["a"]
    assert new_worker.claimed["a"].queue == new_worker.scripts.keys.queue(NEWER)
    await new_worker.emit("a", 0, 504)
    end = await new_worker.finish("a", 1)
    assert await rest(stream) == ([504], end)
    assert await old_worker.serve_once() == []
    assert old_worker.num_refused == 1


async def test_begun_answer_read_by_an_old_worker_continues(client, scripts, old_worker, new_worker) -> None:
    """REAP of an old worker puts the entry into the queue of resumed requests, without its needs."""
    stream = await client.submission.submit(needy())
    assert await new_worker.claim() == ["a"]
    await new_worker.emit("a", 0, 504)
    entry = new_worker.claimed["a"]
    await scripts.redis.xack(entry.queue, GROUP, entry.entry_id)
    await scripts.redis.xdel(entry.queue, entry.entry_id)
    again = await scripts.redis.xadd(scripts.keys.queue(RESUMED), {"r": "a", "s": "0"})
    await scripts.redis.hdel(scripts.keys.request("a"), "worker", "claim")
    await scripts.redis.hset(scripts.keys.request("a"), mapping={"state": "queued", "entry": again})
    assert await old_worker.serve_once() == []
    assert await claimed(new_worker) == ["a"]
    await new_worker.emit("a", 1, 253)
    end = await new_worker.finish("a", 2)
    assert await rest(stream) == ([504, 253], end)


async def test_request_without_a_capable_worker_is_refused(client, scripts, new_worker) -> None:
    is_ready(client, capabilities=0)
    with pytest.raises(NeedsNewerWorker):
        await client.submission.submit(needy())
    assert await scripts.redis.keys("*:r:*") == []
    assert await num_waiting(scripts) == 0


async def test_refused_request_ends_if_no_capable_worker_is_ready(client, old_worker, new_worker) -> None:
    stream = await client.submission.submit(needy())
    is_ready(client, capabilities=0)
    assert await old_worker.serve_once() == []
    assert await rest(stream) == ([], ErrorEvent("a", ErrorCode.QUEUE_TIMEOUT, NEEDS_NEWER_MESSAGE))


@pytest.mark.parametrize(("capabilities", "queue_name"), [(0, NEWER), (SUPPORTED, INTERACTIVE)])
async def test_long_request_avoids_an_old_worker_with_short_context(
    client, scripts, new_worker, capabilities, queue_name
) -> None:
    """A new worker compares lengths itself, so keys still alternate."""
    is_ready(client, capabilities=SUPPORTED)
    is_ready(client, capabilities=capabilities, max_model_len=8)
    stream = await client.submission.submit(needy(allowed_token_ids=None))  # 2 + 9 tokens
    assert await scripts.redis.xlen(scripts.keys.queue(queue_name)) == 1
    await client.submission.release(stream)


async def test_body_with_needs_is_read_back(client, scripts, new_worker) -> None:
    await client.submission.submit(needy(), terms=TERMS)
    (stored,) = await client.archive.stored(["a"])
    assert stored.request == needy()
    assert decode_request(await scripts.redis.hget(scripts.keys.request("a"), "body")) == needy()
