"""Submits requests: stored and queued before any client sees them, withdrawn when their reader releases them.

    stream = await submission.submit(request)  # send the HTTP 200 only after this returned; submit_all() for several
    stream.on_ready = ...; stream.read()       # TokenEvents in order, each index once, then one FinishEvent|ErrorEvent
    await submission.release(stream)           # required if the reader leaves early; it sees FinishEvent(CANCELLED)

A request submitted with RetentionTerms can be attached to from any gateway while it runs and after its end. It is
cancelled when its last holder releases it. No Redis call runs in a request's own task: a cancelled handler must not
leave a reply on the connection for the next caller.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from redis.exceptions import RedisError

from gateway.store.acceptance import Acceptance
from gateway.store.duties import HeldAnswers, Withdrawals
from gateway.store.inbox import Inbox, cancelled_event
from gateway.store.recovery import Recovery
from gateway.store.store_calls import InferenceError, Refused, StoreCalls, StoreUnavailable
from gateway.store.stream_table import StreamTable
from shared.messages import FinishReason, GenerationRequest
from shared.new_requests import RetentionTerms, Share
from shared.redis_scripts import NameTaken

_Result = TypeVar("_Result")


class Submission:
    def __init__(
        self,
        streams: StreamTable,
        acceptance: Acceptance,
        recovery: Recovery,
        held: HeldAnswers,
        withdrawals: Withdrawals,
        calls: StoreCalls,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._acceptance = acceptance
        self._recovery = recovery
        self._held = held
        self._withdrawals = withdrawals
        self._calls = calls
        self._clock = clock

    async def submit(self, request: GenerationRequest, *, terms: RetentionTerms | None = None) -> Inbox:
        """Submit one request; see submit_all()."""
        (stream,) = await self.submit_all([request], [terms] if terms else [])
        return stream

    async def submit_all(
        self,
        requests: Sequence[GenerationRequest],
        terms_of_each: Sequence[RetentionTerms] = (),
        share: Share | None = None,
    ) -> list[Inbox]:
        """Store the requests of one answer, all or none. Safe to cancel: the requests are then withdrawn.

        Args:
            requests: The requests, one per prompt.
            terms_of_each: One per request if the answer is kept; else empty.
            share: What the key may hold in the store; None for no limit.

        Raises:
            Refused: If a limit or the fleet's capabilities do not allow it.
            StoreUnavailable: If the store does not answer.
            NameTaken: If the client's name already has another answer.
        """
        self._acceptance.check_room(self._streams.num_waiting_tokens, requests)
        # Before ACCEPT, because a worker may be faster than its reply.
        streams = [self._open(request, terms) for request, terms in zip_longest(requests, terms_of_each)]
        await self._opened(streams, self._acceptance.accept(streams, share))
        return streams

    async def attach_all(
        self, requests: Sequence[GenerationRequest], terms_of_each: Sequence[RetentionTerms]
    ) -> list[Inbox]:
        """Read the requests of a kept answer, each from its first token. Safe to cancel.

        A stream whose request had already ended in the store has `had_ended`.

        Args:
            requests: The requests, one per prompt.
            terms_of_each: One per request, each with a new holder.

        Raises:
            RequestGone: If the store does not have a request.
            StoreUnavailable: If the store does not answer.
        """
        streams = [self._open(request, terms) for request, terms in zip(requests, terms_of_each, strict=True)]
        await self._opened(streams, self._recovery.attach(streams))
        return streams

    async def release(self, stream: Inbox, reason: FinishReason = FinishReason.CANCELLED, ended_at: int = 0) -> None:
        """Release a request that has not ended; it ends unless it has another holder.

        Store errors are not raised: the call is repeated until the store answers.

        Args:
            stream: The request.
            reason: Why the request ends.
            ended_at: When it ended, in Unix seconds; 0 if unknown.
        """
        if stream in self._streams:
            terminal = cancelled_event(stream, reason, ended_at)
            self._streams.end(stream, terminal)
            self._withdrawals.add(stream, terminal)
            await self._calls.finish(self._withdrawals.send())

    async def cancel(self, request: GenerationRequest) -> None:
        """End a request for all its holders. Store errors are not raised: the call is repeated until it succeeds."""
        self._withdrawals.add_request(request)
        for stream in self._streams.of(request.request_id):
            self._streams.end(stream, cancelled_event(stream))
        await self._calls.finish(self._withdrawals.send())

    def _open(self, request: GenerationRequest, terms: RetentionTerms | None) -> Inbox:
        stream = Inbox(request, terms)
        stream.last_event_at = self._clock()
        self._streams.add(stream)
        return stream

    async def _opened(self, streams: Sequence[Inbox], call: Coroutine[Any, Any, _Result]) -> None:
        """Wait for `call`; if it fails or is cancelled, close the streams here and in the store."""
        task = self._calls.own(call)
        try:
            await asyncio.shield(task)
        except (NameTaken, Refused):
            self._streams.discard(*streams)
            raise
        except (asyncio.CancelledError, RedisError, OSError, InferenceError) as error:
            self._streams.discard(*streams)
            # It may have been stored, now or later.
            task.add_done_callback(lambda _: self._withdrawals.add_all(streams))
            if isinstance(error, (RedisError, OSError)):
                raise StoreUnavailable(str(error)) from error
            raise
        finally:
            del task  # breaks a cycle between its error and this frame, which would keep the request alive
        for stream in streams:
            stream.accept()
        if streams[0].terms is not None:
            self._held.add(streams)
