"""Requests in: stored and queued before anybody reads of them, withdrawn when their reader lets go.

    stream = await submission.submit(request)  # the HTTP 200 goes out only after this returned; submit_all() of several
    async for event in stream: ...             # TokenEvents in order, each index once, then one FinishEvent|ErrorEvent
    await submission.release(stream)           # required if the reader leaves early; it sees FinishEvent(CANCELLED)

A request that is submitted with RetentionTerms can be attached to, here and at other gateways, while it runs and after
its end; it is cancelled when the last of its holders lets go.
No Redis call runs in a request's own task: a cancelled handler must not leave a reply behind for the next caller.

A chat's way in, where it is handed to the store. It knows no text and no HTTP.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from redis.exceptions import RedisError

from gateway.store.acceptance import Acceptance
from gateway.store.duties import HeldAnswers, Withdrawals
from gateway.store.recovery import Recovery
from gateway.store.response_stream import ResponseStream, cancelled_event
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

    async def submit(self, request: GenerationRequest, *, terms: RetentionTerms | None = None) -> ResponseStream:
        """submit_all() of one."""
        (stream,) = await self.submit_all([request], [terms] if terms else [])
        return stream

    async def submit_all(
        self,
        requests: Sequence[GenerationRequest],
        terms_of_each: Sequence[RetentionTerms] = (),
        share: Share | None = None,
    ) -> list[ResponseStream]:
        """Store the requests of one answer, all or none; `terms_of_each`: if it is kept; `share`: what their key may
        hold. Raises QueueFull, ShareFull, StoreUnavailable or NameTaken; safe to cancel (they are withdrawn then)."""
        self._acceptance.check_room(self._streams.num_waiting_tokens, requests)
        # Before ACCEPT: a worker may be faster than our reply.
        streams = [self._open(request, terms) for request, terms in zip_longest(requests, terms_of_each)]
        await self._opened(streams, self._acceptance.accept(streams, share))
        return streams

    async def attach_all(
        self, requests: Sequence[GenerationRequest], terms_of_each: Sequence[RetentionTerms]
    ) -> list[ResponseStream]:
        """Read the requests of a kept answer, each from its first token; each `terms.holder` is a new one. What had
        ended in the store before says so (`had_ended`). Raises StoreUnavailable, or RequestGone for one that is there
        no more; safe to cancel."""
        streams = [self._open(request, terms) for request, terms in zip(requests, terms_of_each, strict=True)]
        await self._opened(streams, self._recovery.attach(streams))
        return streams

    async def release(
        self, stream: ResponseStream, reason: FinishReason = FinishReason.CANCELLED, ended_at: int = 0
    ) -> None:
        """Let go of a request that has not ended: it ends for this `reason`, unless somebody else holds it, and at this
        time (Unix seconds).

        Never raises for the store: repeated until it answers."""
        if stream in self._streams:
            terminal = cancelled_event(stream, reason, ended_at)
            self._streams.end(stream, terminal)
            self._withdrawals.add(stream, terminal)
            await self._calls.finish(self._withdrawals.send())

    async def cancel(self, request: GenerationRequest) -> None:
        """End a request, whoever holds it. Never raises for the store: repeated until it answers."""
        self._withdrawals.add_request(request)
        for stream in self._streams.of(request.request_id):
            self._streams.end(stream, cancelled_event(stream))
        await self._calls.finish(self._withdrawals.send())

    def _open(self, request: GenerationRequest, terms: RetentionTerms | None) -> ResponseStream:
        stream = ResponseStream(request, terms)
        stream.last_heard = self._clock()
        self._streams.add(stream)
        return stream

    async def _opened(self, streams: Sequence[ResponseStream], call: Coroutine[Any, Any, _Result]) -> None:
        """They are the store's now; without its reply the streams are closed again, in the store too."""
        task = self._calls.own(call)
        try:
            await asyncio.shield(task)
        except (NameTaken, Refused):
            self._streams.discard(*streams)
            raise
        except (asyncio.CancelledError, RedisError, OSError, InferenceError) as error:
            self._streams.discard(*streams)
            task.add_done_callback(
                lambda _: self._withdrawals.add_all(streams)
            )  # it may have been stored, now or later
            if isinstance(error, (RedisError, OSError)):
                raise StoreUnavailable(str(error)) from error
            raise
        finally:
            del task  # its error has this frame, which would have it: a circle that holds the request for long
        for stream in streams:
            stream.is_accepted = True
        if streams[0].terms is not None:
            self._held.add(streams)
