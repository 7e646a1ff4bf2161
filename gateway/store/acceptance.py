"""ACCEPT as one gateway calls it: the requests of an answer all or none, and what the store has lost once more."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from redis.exceptions import RedisError

from gateway.store.response_stream import ResponseStream
from gateway.store.store_calls import StoreUnavailable
from shared.messages import encode
from shared.redis_client import got_no_reply
from shared.redis_scripts import AcceptStatus, NewRequest, RedisScripts

ACCEPT_ATTEMPTS = 3
ACCEPT_RETRY_SECONDS = 0.1


class Acceptance:
    def __init__(self, gateway_id: str, max_queued_requests: int) -> None:
        self._gateway_id = gateway_id
        self._max_queued_requests = max_queued_requests

    async def accept(self, scripts: RedisScripts, streams: Sequence[ResponseStream]) -> AcceptStatus:
        """The new requests of one answer. Raises StoreUnavailable or NameTaken."""
        requests = [
            NewRequest(stream.request_id, encode(stream.request), keep=stream.keep) for stream in streams
        ]
        for attempts_left in reversed(range(ACCEPT_ATTEMPTS)):
            try:
                return await scripts.accept_all(
                    requests,
                    gateway_id=self._gateway_id,
                    priority_class=streams[0].request.priority_class,
                    max_queued=self._max_queued_requests,
                )
            except (RedisError, OSError) as error:
                if not attempts_left or not got_no_reply(error):
                    raise StoreUnavailable(str(error)) from error
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    async def restore(self, scripts: RedisScripts, stream: ResponseStream) -> None:
        """One that was accepted and that the store lost, whatever the queue's cap, behind the tokens already sent. Its
        name is not restored."""
        keep = replace(stream.keep, name="", fingerprint="") if stream.keep else None
        journal = b"".join(map(encode, stream.frames))
        await scripts.accept_all(
            [NewRequest(stream.request_id, encode(stream.request), journal, keep)],
            gateway_id=self._gateway_id,
            priority_class=stream.request.priority_class,
        )
