"""Writes each engine step's events to the journal and publishes them to gateways, exactly once.

Each step takes one EMIT for all sequences (journal before publish, in one script), then one FINISH for ended ones. Both
are retried while the store is unavailable; the step number makes a retry harmless. A worker without a reply for 10 s
fences itself, before peers take its requests after 15 missed heartbeats.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from redis.exceptions import RedisError

from engine_worker.transport.claims import ClaimedRequest, Claims
from engine_worker.transport.fault_counts import FaultCounts
from shared.messages import (
    JournalExtras,
    JournalFrame,
    StreamEvent,
    TerminalEvent,
    TokenEvent,
    encode,
)
from shared.redis_scripts import Ending, Fenced, GatewayMessage, RedisScripts, StepFrame, gateway_message
from shared.store_errors import StoreRetry, got_no_reply

SELF_FENCE_SECONDS = 10.0

logger = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")
_Event = TypeVar("_Event", TokenEvent, TerminalEvent)


class TokenPublisher:
    def __init__(
        self,
        scripts: RedisScripts,
        worker_id: str,
        claims: Claims,
        *,
        self_fence_seconds: float = SELF_FENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        faults: FaultCounts | None = None,
    ) -> None:
        self._scripts = scripts
        self._worker_id = worker_id
        self._claims = claims
        self._self_fence_seconds = self_fence_seconds
        self._clock = clock
        self._sleep = sleep
        self._step = 0  # of the last EMIT that the store has applied
        self._in_order = asyncio.Lock()
        self._fenced: Fenced | None = None
        self.faults = faults or FaultCounts()

    async def emit(self, events: Sequence[TokenEvent]) -> list[str]:
        """Journal and publish one engine step's tokens, in one script call for the whole batch.

        Retried while the store is unavailable. Events of requests that are not claimed are dropped.

        Returns:
            The ids of cancelled requests: abort them, then `finish` them with FinishReason.CANCELLED.

        Raises:
            Fenced: If the worker is fenced, or got no reply for 10 s.
        """
        async with self._in_order:
            claimed = self._claimed(events)
            if not claimed:
                return []
            frames: dict[str, StepFrame] = {}
            for event, claim in claimed:
                request_id, data = event.request_id, _frame(event)
                if request_id in frames:  # another choice of the request: append both as one
                    data = frames[request_id].data + data
                frames[request_id] = StepFrame(request_id, claim.entry_id, data)
            step, of_step = self._step + 1, list(frames.values())
            messages = self._messages(step, claimed, frames)
            cancelled = await self._held(lambda: self._scripts.emit(self._worker_id, step, of_step, messages))
            self._step = step
            return cancelled

    async def finish(self, events: Sequence[TerminalEvent]) -> None:
        """Acknowledge, store, and publish the end of requests. Call it after the emit of their last tokens.

        `usage.completion_tokens` must count all output tokens, including those of earlier attempts.

        Raises:
            Fenced: If the worker is fenced, or got no reply for 10 s.
        """
        async with self._in_order:
            claimed = self._claimed(events)
            if not claimed:
                return
            endings = [Ending(event.request_id, claim.queue, claim.entry_id, encode(event)) for event, claim in claimed]
            messages = self._messages(self._step, claimed, [ending.request_id for ending in endings])
            await self._held(lambda: self._scripts.finish(self._worker_id, endings, messages, self._step))
            for ending in endings:
                self._claims.remove(ending.request_id)

    def _claimed(self, events: Iterable[_Event]) -> list[tuple[_Event, ClaimedRequest]]:
        """Return the events whose requests are claimed here, each with its claim."""
        return [(event, claim) for event in events if (claim := self._claims.get(event.request_id)) is not None]

    def _messages(
        self, step: int, claimed: Iterable[tuple[StreamEvent, ClaimedRequest]], request_ids: Iterable[str]
    ) -> list[GatewayMessage]:
        """Return one message per gateway. `request_ids`: those of the script call, in its order."""
        by_gateway: defaultdict[str, list[StreamEvent]] = defaultdict(list)
        for event, claim in claimed:
            by_gateway[claim.gateway_id].append(event)
            for gateway_id in claim.more_gateway_ids:
                by_gateway[gateway_id].append(event)
        positions = {request_id: position for position, request_id in enumerate(request_ids)}
        return [
            gateway_message(gateway_id, self._worker_id, step, its_events, positions)
            for gateway_id, its_events in by_gateway.items()
        ]

    async def _held(self, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        if self._fenced:
            raise self._fenced
        try:
            return await self._until_applied(call)
        except Fenced as fenced:
            self._fenced = fenced
            raise

    async def _until_applied(self, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        last_reply = self._clock()
        retry = StoreRetry(has_succeeded=True, clock=self._clock)
        while True:
            try:
                return await call()
            except (RedisError, OSError) as error:
                delay_seconds = retry.delay_after(error)
                if not got_no_reply(error):
                    last_reply = self._clock()  # the store replies but cannot write, so no peer can take the requests
                elif self._clock() - last_reply >= self._self_fence_seconds:
                    raise Fenced(f"no reply from the store for {self._self_fence_seconds:.0f} s") from error
                logger.warning("step: not stored; retrying in %.1f s: %s", delay_seconds, error)
            self.faults.num_retries += 1
            await self._sleep(delay_seconds)


def _frame(event: TokenEvent) -> bytes:
    extras = JournalExtras(event.logprobs, event.prompt_logprobs) if event.logprobs or event.prompt_logprobs else None
    return encode(JournalFrame(event.index, event.token_ids, extras, event.choice, event.finish_reason))
