"""Claims requests from the priority queues for one worker incarnation. The caller decides how many.

    queue entry --TAKE or XREADGROUP BLOCK (wakes.py)--> backlog --CLAIM--> ClaimedRequest

A read is never repeated blindly: an entry whose reply was lost is in the worker's pending list, which is read after
every failed read and every few seconds, because a server may deliver to a read that its client gave up. A request
suspected of crashing workers ("solo") is claimed only when nothing else runs; while it waits or runs, nothing else is
claimed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine_worker.transport.claims import ClaimedRequest, Claims
from engine_worker.transport.fault_counts import FaultCounts
from engine_worker.transport.patience import Patience
from engine_worker.transport.wakes import Wakes
from engine_worker.transport.worker_profile import WorkerProfile
from shared.capabilities import UNREADABLE_MESSAGE
from shared.fleet_clock import FleetClock
from shared.messages import (
    ErrorCode,
    ErrorEvent,
    FormatError,
    decode_request,
    encode,
    journal_choices,
)
from shared.reaping import ReapSummary, reap_worker
from shared.redis_client import BLOCK_SECONDS, RedisConnections, is_missing_group
from shared.redis_keys import GROUP, NEWER, PRIORITY_CLASSES
from shared.redis_scripts import (
    ClaimReply,
    Demand,
    Ending,
    Fenced,
    QueueEntry,
    ReapMode,
    RedisScripts,
    gateway_message,
    queue_entry,
)
from shared.store_errors import StoreRetry
from shared.ticks import until_tick

REREAD_SECONDS = 5.0
REREAD_MAX_ENTRIES = 4096  # far more than one worker holds
UNFIT_PAUSE_SECONDS = 1.0  # keeps a worker from rereading entries that it passed on; TAKE continues meanwhile
BATCH_RECHECK_SECONDS = 0.02  # between checks whether class `batch` may claim, while it may not

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Verdict:
    """The outcome of queue entries: requests to run, entries to finish at once, and errors by gateway."""

    claimed: list[ClaimedRequest] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    errors: dict[str, list[ErrorEvent]] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)  # index in endings, by id of a refused request

    def refuse(self, entry: QueueEntry, reply: ClaimReply, code: ErrorCode, message: str) -> None:
        event = ErrorEvent(entry.request_id, code, message)
        self.positions[entry.request_id] = len(self.endings)
        self.endings.append(Ending(entry.request_id, entry.queue, entry.entry_id, encode(event)))
        self.errors.setdefault(reply.gateway_id, []).append(event)


class RequestStream:
    def __init__(
        self,
        connections: RedisConnections,
        scripts: RedisScripts,
        worker_id: str,
        claims: Claims,
        clock: Callable[[], float] = time.monotonic,
        fleet_clock: FleetClock | None = None,
        faults: FaultCounts | None = None,
        profile: WorkerProfile | None = None,
    ) -> None:
        """Create the stream.

        Args:
            connections: To the store.
            scripts: The store's scripts.
            worker_id: The incarnation.
            claims: Gets the claimed requests.
            clock: Monotonic, in seconds.
            fleet_clock: The clock of deadlines; None: gateways enforce them.
            faults: Counts failed reads.
            profile: Requests that need more than its abilities are passed on to other workers.
        """
        profile = profile or WorkerProfile()
        self._abilities = profile.abilities
        self._blocking: Redis = connections.blocking
        self._scripts = scripts
        self._worker_id = worker_id
        self._claims = claims
        self._clock = clock
        self._fleet_clock = fleet_clock
        self._backlog: list[QueueEntry] = []  # read, not claimed
        self._patience = Patience(clock)
        self._retry = StoreRetry(has_succeeded=True, clock=clock)  # register() has succeeded
        self._reread_at = clock() + REREAD_SECONDS
        self._waits_for_newer_at = clock()  # when the queue NEWER may wake this worker again
        self.faults = faults or FaultCounts()
        self.wakes = Wakes(profile.has_peers)
        # The last TAKE left no entry, and the store knows that there is room: a message comes before the next entry.
        self._has_seen_all = False
        self._new_queues = tuple(map(scripts.keys.queue, PRIORITY_CLASSES))

    async def claim(self, demand: Demand, *, block: bool = False) -> list[ClaimedRequest]:
        """Claim new requests, highest class first, as demand and the peers' share allow.

        Call it from one task, and cancel that only at shutdown. Cancelled and unreadable entries are finished here.
        While the store is unavailable, nothing is returned.

        Args:
            demand: The room for requests.
            block: Whether to wait for the first request, at most until the next tick.

        Raises:
            Fenced: If this incarnation was declared dead.
        """
        if demand.requests + demand.others <= 0 or self._claims.runs_solo:
            return await self._nothing_to_claim(block)
        try:
            await self._fill_backlog(demand, block)
            self._retry.succeeded()
            entries = self._next_entries(demand.requests + demand.others)
            return await self._claim(entries) if entries else await self._nothing_to_claim(block and self._must_wait)
        except (RedisError, OSError) as error:
            await self._endure(error, block)
            return []

    async def peers_level(self, room: int) -> int | None:
        """Return the number of requests of the least-loaded peer with room, if nothing waits in the queue for it.

        None: requests wait, there is no such peer, or the store did not answer.
        """
        try:
            return await self._scripts.level(self._worker_id, self.num_held, room)
        except (RedisError, OSError) as error:
            await self._endure(error, block=False)
            return None

    async def unclaim(self, request_ids: Iterable[str]) -> None:
        """Return requests that have not started to the queue. Retry until the store answers. Raises Fenced."""
        claims = [claim for id_ in request_ids if (claim := self._claims.get(id_))]
        claims.sort(key=lambda claim: [int(part) for part in claim.entry_id.split(b"-")])
        entries = [QueueEntry(claim.queue, claim.entry_id, claim.request.request_id, claim.solo) for claim in claims]
        while entries:
            try:
                await self._scripts.unclaim(self._worker_id, entries)
                break
            except (RedisError, OSError) as error:
                await self._endure(error, block=True)
        for entry in entries:
            self._claims.remove(entry.request_id)

    def queue_timed_out(self) -> set[str]:
        """Return the ids of claimed requests without stored tokens whose queue timeout has passed."""
        timed = [claim for claim in self._claims if claim.request.queue_deadline is not None]
        return {claim.request.request_id for claim in timed if self._overdue(claim) is ErrorCode.QUEUE_TIMEOUT}

    @property
    def num_held(self) -> int:
        return len(self._claims) + len(self._backlog)

    async def hand_back(self) -> ReapSummary:
        """End this incarnation: requeue every unfinished request without counting an attempt."""
        return await reap_worker(self._scripts, self._worker_id, ReapMode.DRAIN)

    async def hand_back_within(self, seconds: float) -> None:
        """Retry hand_back() while the store is unavailable.

        Raises:
            TimeoutError: If the store is still unavailable after `seconds`.
            Fenced: If this incarnation was declared dead.
        """
        ends_at = self._clock() + seconds
        while True:
            try:
                await self.hand_back()
                return
            except (RedisError, OSError) as error:
                if self._clock() >= ends_at:
                    raise TimeoutError("the store is unavailable") from error
                await self._endure(error, block=True)

    async def _nothing_to_claim(self, block: bool) -> list[ClaimedRequest]:
        if block:
            await self._claims.wait_until_one_ends(BLOCK_SECONDS)
        return []

    async def _endure(self, error: Exception, block: bool) -> None:
        self.faults.num_read_failures += 1
        self._reread_at = self._clock()
        if isinstance(error, RedisError) and is_missing_group(error):
            raise Fenced("the store lost its queues") from error
        delay_seconds = self._retry.delay_after(error)
        logger.warning("claim: failed; rereading own pending entries: %s", error)
        if block:
            await asyncio.sleep(delay_seconds)

    async def _fill_backlog(self, demand: Demand, block: bool) -> None:
        if self._clock() >= self._reread_at:
            await self._reread_own_pending()
        wanted = max(0, demand.requests - len(self._claimable))
        if wanted + demand.others <= 0 or self._solo_waits:
            return
        if block and self._has_seen_all:
            self._has_seen_all = False
            if self.wakes.are_sent:
                await self.wakes.wait(until_tick(BLOCK_SECONDS) if demand.of_last else BATCH_RECHECK_SECONDS)
                return
        demand = replace(demand, requests=wanted)
        self.wakes.begin_look()
        taken = await self._scripts.take(
            self._worker_id,
            demand,
            num_held=self.num_held,
            is_impatient=self._patience.is_over,
            abilities=self._abilities,
            waiting_flows=self._flows_of(demand.waiting_tenants) if demand.others else (),
        )
        self._add_read(taken.entries)
        self._patience.observe(taken)
        self._has_seen_all = demand.most_room > len(taken.entries) and taken.allowance > 0 and not taken.others_wait
        if not block or self._backlog:
            return
        if taken.others_wait or not taken.allowance:
            await self.wakes.wait(self._patience.pause_seconds)
        elif not self.wakes.are_sent:
            await self._wait_for_entries(taken.batch_allowance)

    def _add_read(self, entries: list[QueueEntry]) -> None:
        self.wakes.observe(entries, self._new_queues)
        self._backlog += entries

    def _flows_of(self, tenants: frozenset[str]) -> set[str]:
        return {claim.flow for claim in self._claims if claim.flow and claim.request.tenant in tenants}

    async def _wait_for_entries(self, max_batch: int) -> None:
        """Read one entry per queue. The next call takes the rest of a burst, in order of priority."""
        queues = list(self._scripts.keys.queues if max_batch else self._scripts.keys.queues[:-1])
        if self._clock() < self._waits_for_newer_at:
            queues.remove(self._scripts.keys.queue(NEWER))
        block_seconds = until_tick(BLOCK_SECONDS) if max_batch else BATCH_RECHECK_SECONDS
        self._add_read(await self._read(">", 1, ceil(block_seconds * 1000), queues))

    async def _reread_own_pending(self) -> None:
        known = {(claim.queue, claim.entry_id) for claim in self._claims}
        known.update((entry.queue, entry.entry_id) for entry in self._backlog)
        pending = await self._read("0", REREAD_MAX_ENTRIES, None)
        self._backlog += [entry for entry in pending if (entry.queue, entry.entry_id) not in known]
        self._reread_at = self._clock() + REREAD_SECONDS

    async def _read(
        self, entry_id: str, count: int, block_milliseconds: int | None, queues: Sequence[str] = ()
    ) -> list[QueueEntry]:
        streams: dict[Any, Any] = dict.fromkeys(queues or self._scripts.keys.queues, entry_id)
        reply: Any = await self._blocking.xreadgroup(
            GROUP, self._worker_id, streams, count=count, block=block_milliseconds
        )
        read = [queue_entry(queue, entry_id, fields) for queue, entries in reply for entry_id, fields in entries]
        return await self._without_unfit(read)

    async def _without_unfit(self, entries: list[QueueEntry]) -> list[QueueEntry]:
        """Pass on entries that this worker cannot serve, which XREADGROUP, unlike TAKE, may return."""
        unfit = [entry for entry in entries if not self._abilities.serve(entry.needs, entry.context_tokens)]
        if not unfit:
            return entries
        await self._scripts.unclaim(self._worker_id, unfit, queue_name=NEWER)
        self._waits_for_newer_at = self._clock() + UNFIT_PAUSE_SECONDS
        return [entry for entry in entries if entry not in unfit]

    @property
    def _solo_waits(self) -> bool:
        return any(entry.solo for entry in self._backlog)

    @property
    def _claimable(self) -> list[QueueEntry]:
        """The backlog without second entries of requests that run here.

        A second entry waits for the end of the running attempt, whose tokens would otherwise count for it.
        """
        return [entry for entry in self._backlog if self._claims.get(entry.request_id) is None]

    @property
    def _must_wait(self) -> bool:
        """Whether entries wait for the end of a request that runs here."""
        return bool(self._backlog)

    def _next_entries(self, max_requests: int) -> list[QueueEntry]:
        solo = next((entry for entry in self._backlog if entry.solo), None)
        if solo is None:
            return self._claimable[:max_requests]
        return [] if self._claims else [solo]

    async def _claim(self, entries: Sequence[QueueEntry]) -> list[ClaimedRequest]:
        replies = await self._scripts.claim(self._worker_id, entries)
        self._backlog = [entry for entry in self._backlog if entry not in entries]
        verdict = _Verdict()
        for entry, reply in zip(entries, replies, strict=True):
            self._judge(entry, reply, verdict)
        for claimed in verdict.claimed:
            self._claims.add(claimed)
        await self._finish(verdict)
        return verdict.claimed

    def _judge(self, entry: QueueEntry, reply: ClaimReply | None, verdict: _Verdict) -> None:
        if reply is None:
            verdict.endings.append(Ending(entry.request_id, entry.queue, entry.entry_id))
            return
        try:
            claimed = _claimed(entry, reply, self._abilities.capabilities)
        except FormatError as error:
            logger.error("request %s: unreadable: %s", entry.request_id, error)
            verdict.refuse(entry, reply, ErrorCode.REQUEST_FAILED, UNREADABLE_MESSAGE)
            return
        if overdue := self._overdue(claimed):
            verdict.refuse(entry, reply, overdue, "the timeout passed before a worker started the request")
        else:
            verdict.claimed.append(claimed)

    def _overdue(self, claimed: ClaimedRequest) -> ErrorCode | None:
        """Return the error code of a passed deadline or queue timeout, or None."""
        request = claimed.request
        if self._fleet_clock is None or not self._fleet_clock.is_set:
            return None
        now = self._fleet_clock.now()
        if request.deadline is not None and now >= request.deadline:
            return ErrorCode.DEADLINE_EXCEEDED
        was_begun = any(choice.token_ids for choice in claimed.stored)
        if request.queue_deadline is not None and now >= request.queue_deadline and not was_begun:
            return ErrorCode.QUEUE_TIMEOUT
        return None

    async def _finish(self, verdict: _Verdict) -> None:
        if not verdict.endings:
            return
        messages = [
            gateway_message(gateway_id, self._worker_id, 0, events, verdict.positions)
            for gateway_id, events in verdict.errors.items()
        ]
        try:
            await self._scripts.finish(self._worker_id, verdict.endings, messages)
        except (RedisError, OSError) as error:
            await self._endure(error, block=False)  # the entries stay pending; the next reread finds them


def _claimed(entry: QueueEntry, reply: ClaimReply, capabilities: int) -> ClaimedRequest:
    request = decode_request(reply.body, capabilities)
    if request.request_id != entry.request_id:
        raise FormatError(f"request_id: expected {entry.request_id}, got {request.request_id}")
    return ClaimedRequest(
        request=request,
        stored=journal_choices(reply.journal, request.sampling.n),
        gateway_id=reply.gateway_id,
        attempt=reply.attempt,
        queue=entry.queue,
        entry_id=entry.entry_id,
        solo=reply.solo,
        queued_ms=entry.queued_ms,
        flow=entry.flow,
        home=entry.home or "",
    )
