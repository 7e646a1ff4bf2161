"""ACCEPT and ATTACH, as one gateway calls them: an answer's requests all or none, and requests that the store lost.

A request refused for the queue's length or its key's share leaves nothing in the store.

One key that fills the store closes it for all: admission stops at CLOSE_AT_RATIO (store_probe.py). A key's share counts
its requests' bodies and what they may write: a token takes 11 bytes of a journal, each log-probability 13 more.
Log-probabilities are reserved in full. Of plain tokens only the first are reserved, because most answers end long
before their limit; the rest is counted as it is written (shared/redis_scripts/account.lua).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from redis.exceptions import RedisError

from gateway.fleet import Fleet
from gateway.store.inbox import Inbox
from gateway.store.replication import Replication
from gateway.store.serving_rate import ServingRate
from gateway.store.store_calls import (
    NeedsNewerWorker,
    QueueFull,
    QueueShareFull,
    ShareFull,
    StartsLate,
    StoreUnavailable,
)
from shared.capabilities import NEEDS_NEWER_MESSAGE, needs_of
from shared.fleet_clock import FleetClock
from shared.messages import PROTOCOL_VERSION, EventBatch, GenerationRequest, SamplingParams, encode
from shared.new_requests import NewRequest, Share
from shared.redis_keys import INTERACTIVE, NEWER
from shared.redis_scripts import AcceptStatus, AttachStatus, QueueShareExceeded, RedisScripts, StartsTooLate
from shared.store_errors import got_no_reply, rule_of

RESERVED_TOKENS = 1024  # per choice without log-probabilities
TOKEN_BYTES, SCORES_BYTES, SCORE_BYTES = 12, 24, 13  # per token, per its own log-probability, per each other one
QUEUE_LIMIT_RATIO = 0.95  # of the queue time limit: at the limit itself, one of 50 accepted requests came too late
ACCEPT_ATTEMPTS = 3
ACCEPT_RETRY_SECONDS = 0.1


def share_of(owner_key_hash: str, ratio: float, store_bytes: int, num_models: int) -> Share:
    """Return a key's share of the store's bytes for one model; models are counted separately.

    It is unlimited if the store has no limit, or if `ratio` is 1 (there is only one key).
    """
    if not store_bytes or ratio >= 1:
        return Share(owner_key_hash)
    return Share(owner_key_hash, int(store_bytes * ratio / num_models))


def reserved_bytes(request: GenerationRequest) -> int:
    """Return the bytes that the request's journal may need, as counted toward its key's share."""
    sampling = request.sampling
    is_plain = sampling.logprobs is None
    num_tokens = sampling.n * (min(sampling.max_tokens, RESERVED_TOKENS) if is_plain else sampling.max_tokens)
    prompt_scores = sampling.prompt_logprobs
    of_prompt = 0 if prompt_scores is None else len(request.prompt_token_ids) * _scores_bytes(prompt_scores)
    return of_prompt + num_tokens * (TOKEN_BYTES + _scores_of_token(sampling))


def _scores_of_token(sampling: SamplingParams) -> int:
    if sampling.logprobs is None:
        return 0
    return _scores_bytes(max(sampling.logprobs, len(sampling.logprob_token_ids)))


def _scores_bytes(count: int) -> int:
    return SCORES_BYTES + SCORE_BYTES * count


@dataclass(frozen=True, slots=True)
class QueueRules:
    """How requests of one model are queued."""

    max_requests: int = 1024  # of each priority class, for all gateways
    max_tokens: int | None = None  # prompt tokens that this gateway has waiting; None: no limit
    prefix_affinity: bool = True  # requests prefer the worker that has their prefix in its cache
    replica_timeout_seconds: float | None = None  # a replica must have a request within this time; None: no replica


class Acceptance:
    def __init__(
        self,
        scripts: RedisScripts,
        gateway_id: str,
        fleet: Fleet,
        rules: QueueRules,
        serving_rate: ServingRate,
        fleet_clock: FleetClock,
        replication: Replication | None = None,
    ) -> None:
        self._rules = rules
        self._serving_rate = serving_rate
        self._fleet_clock = fleet_clock
        self._replication = replication
        self._fleet = fleet
        self._scripts = scripts
        self._gateway_id = gateway_id

    def check_room(self, num_waiting_tokens: int, requests: Sequence[GenerationRequest]) -> None:
        """Raise QueueFull if the waiting prompts and the new ones exceed the limit."""
        if self._rules.max_tokens is None:
            return
        num_new = sum(len(request.prompt_token_ids) for request in requests)
        if num_waiting_tokens and num_waiting_tokens + num_new > self._rules.max_tokens:
            raise QueueFull(f"{num_waiting_tokens} prompt tokens are waiting; at most {self._rules.max_tokens}")

    async def accept(self, streams: Sequence[Inbox], share: Share | None) -> None:
        """Store and queue the requests of one answer.

        Raises:
            Refused: If a limit or the fleet's capabilities do not allow it.
            StoreUnavailable: If the store does not answer, or no replica has the requests.
            NameTaken: If the client's name already has another answer.
        """
        limit_seconds, per_second = self._queue_limit(streams[0].request)
        try:
            most_ahead = -1 if per_second is None else int(QUEUE_LIMIT_RATIO * per_second * limit_seconds)
            status = await self._repeated(streams, share, most_ahead)
        except StartsTooLate as error:
            assert per_second is not None
            raise StartsLate(error.num_ahead, per_second, limit_seconds) from error
        except QueueShareExceeded as error:
            cap = self._rules.max_requests
            raise QueueShareFull(min(error.max_places, cap), cap) from error
        if status is AcceptStatus.BUSY:
            priority_class = streams[0].request.priority_class
            raise QueueFull(f"{self._rules.max_requests} requests of class {priority_class} are waiting")
        if status is AcceptStatus.FULL:
            assert share is not None and share.max_bytes is not None
            raise ShareFull(share.max_bytes)
        if self._replication is not None:
            await self._replication.confirm()

    def _queue_limit(self, request: GenerationRequest) -> tuple[float, float | None]:
        """Return the seconds in which it must start, and the requests that are served per second, if both are known."""
        if request.queue_deadline is None or request.priority_class != INTERACTIVE:
            return 0.0, None  # how long a batch waits depends on interactive requests
        return max(0.0, request.queue_deadline - self._fleet_clock.now()), self._serving_rate.per_second()

    async def _repeated(self, streams: Sequence[Inbox], share: Share | None, most_ahead: int) -> AcceptStatus:
        requests = [
            NewRequest.of(
                stream.request,
                terms=stream.terms,
                reserved_bytes=reserved_bytes(stream.request),
                prefix_key=stream.request.prefix_key if self._rules.prefix_affinity else b"",
            )
            for stream in streams
        ]
        if not all(self._fleet.can_serve(request.needs) for request in requests):
            raise NeedsNewerWorker(NEEDS_NEWER_MESSAGE)
        for attempts_left in reversed(range(ACCEPT_ATTEMPTS)):
            try:
                return await self._scripts.accept_all(
                    requests,
                    gateway_id=self._gateway_id,
                    priority_class=streams[0].request.priority_class,
                    max_queued=self._rules.max_requests,
                    share=share,
                    queue_name=self._queue_name(requests),
                    wakes=len(self._fleet.ready) > 1,
                    most_ahead=most_ahead,
                )
            except (RedisError, OSError) as error:
                # A server that is not, or no longer, the primary has refused it; the next attempt asks the primary.
                may_succeed = got_no_reply(error) or rule_of(error).closes_connections
                if not attempts_left or not may_succeed:
                    raise StoreUnavailable(str(error)) from error
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                if any(stream.num_tokens for stream in streams):
                    # A worker has it. If the store has lost it meanwhile, only restore() keeps these tokens.
                    return AcceptStatus.OK
        raise AssertionError("the last attempt returns or raises")

    def _queue_name(self, requests: Sequence[NewRequest]) -> str:
        """Return NEWER while an old worker could take one of them and answer it wrongly; else "" (by class)."""
        fails = any(self._fleet.an_old_worker_fails(new.needs, new.context_tokens) for new in requests)
        return NEWER if fails else ""

    async def attach(self, stream: Inbox, *, again: bool = False) -> AttachStatus:
        """Subscribe this gateway to a kept request; `again` if it was subscribed before."""
        assert stream.terms is not None
        return await self._scripts.attach(stream.request_id, stream.terms.holder, self._gateway_id, again=again)

    async def take_back(self, stream: Inbox) -> bool:
        """Withdraw a request, and return whether that was done.

        A request that has ended or that other clients may read is left as it is.
        """
        if stream.terms is not None:
            return False
        return await self._scripts.cancel(stream.request_id, stream.request.priority_class)

    async def forget(self, stream: Inbox) -> None:
        """Delete a request that a worker ended without running it, so that it can be accepted again."""
        keys = self._scripts.keys
        await self._scripts.redis.unlink(keys.request(stream.request_id), keys.journal(stream.request_id))

    def can_serve(self, request: GenerationRequest) -> bool:
        return self._fleet.can_serve(needs_of(request))

    async def restore(self, stream: Inbox) -> None:
        """Accept a request again that the store lost, with its tokens so far and regardless of the queue's cap.

        The caller must have suspended the stream (StreamTable.suspend). The client's name is not restored.
        """
        terms = replace(stream.terms, name="", fingerprint="") if stream.terms else None
        new = NewRequest.of(stream.request, journal=b"".join(map(encode, stream.frames)), terms=terms)
        await self._scripts.accept_all(
            [new],
            gateway_id=self._gateway_id,
            priority_class=stream.request.priority_class,
            queue_name=NEWER if new.needs else self._queue_name([new]),
        )
        await self.publish_mark(stream)

    async def publish_mark(self, stream: Inbox) -> None:
        """Publish a message without events to this gateway; it arrives after everything of the previous epoch."""
        mark = EventBatch(PROTOCOL_VERSION, self._gateway_id, stream.epoch, [])
        await self._scripts.redis.publish(self._scripts.keys.gateway_channel(self._gateway_id), encode(mark))
