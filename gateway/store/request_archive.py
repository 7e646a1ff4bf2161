"""The requests that the store has, running or ended, read by id or by their clients' own names.

A takeover's last step here, and the way in of who reads a kept answer. It knows no client and no format.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from redis.asyncio import Redis

from gateway.fair_pool import FairPool
from gateway.store.store_calls import StoreCalls, StoreUnavailable
from gateway.store.stored_request import FIELDS, StoredRequest, stored_answer, stored_request
from shared.messages import GenerationRequest, StoredChoice, TerminalEvent
from shared.redis_keys import RedisKeys

DECODING_THREADS = 3
_Decoded = TypeVar("_Decoded")


class RequestArchive:
    def __init__(self, redis: Redis, keys: RedisKeys, calls: StoreCalls) -> None:
        self._redis = redis
        self._keys = keys
        self._calls = calls
        self._pool = FairPool(DECODING_THREADS)

    async def stored(self, request_ids: Iterable[str]) -> list[StoredRequest | None]:
        """The requests that there are. Raises StoreUnavailable, and FormatError for what cannot be read."""
        replies = await self._calls.ask(self.read(list(request_ids), FIELDS))
        return [
            await self.decode(_owner_of(fields), _length_of(journal), partial(stored_request, fields, journal))
            for fields, journal in replies
        ]

    async def decoded(
        self, request: GenerationRequest, stored: Any, journal: Any, known: Sequence[int] = ()
    ) -> tuple[list[StoredChoice], TerminalEvent | None]:
        """As stored_answer(), long ones beside the event loop. Raises FormatError."""
        work = partial(stored_answer, request, stored, journal, known)
        return await self.decode(request.tenant, _length_of(journal), work)

    async def decode(self, key: Hashable, num_bytes: int, decode: Callable[[], _Decoded]) -> _Decoded:
        """Return or raise what `decode` does. Long ones are decoded beside the event loop, at 20 us a token with
        its log-probabilities: those of one key wait for each other, and for nobody else's."""
        return await self._pool.run(key, num_bytes, decode, may_refuse=False)

    def close(self) -> None:
        self._pool.close()

    async def erase(self, request_ids: Iterable[str]) -> None:
        """Erase what was asked and answered, of requests that have ended. That they have is told a while longer, to
        gateways that still read them. Raises StoreUnavailable."""
        await self._calls.ask(self._erase(list(request_ids)))

    async def named(self, digest: str) -> tuple[str, str] | None:
        """(id, fingerprint) of the request that a client's own name stands for. Raises StoreUnavailable."""
        return await self._calls.ask(self._read_name(digest))

    async def forget(self, request_ids: Iterable[str], name: str) -> None:
        """Requests that have ended, and their client's name for them. What is not forgotten now expires by itself."""
        keys = [key for id_ in request_ids for key in (self._keys.request(id_), self._keys.journal(id_))]
        with suppress(StoreUnavailable):
            await self._calls.ask(self._unlink([*keys, self._keys.client_name(name)]))

    async def _unlink(self, keys: list[str]) -> None:
        await self._redis.unlink(*keys)

    async def read(self, request_ids: list[str], fields: Iterable[str]) -> list[tuple[Any, Any]]:
        """Fields of the hash, and the journal; either may be the server's error. The hash is read first: if it tells
        the end, the journal read after it is whole. For tasks of the gateway's own only."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                pipeline.hmget(self._keys.request(request_id), list(fields))
                pipeline.get(self._keys.journal(request_id))
            replies = await pipeline.execute(raise_on_error=False)
        return list(zip(replies[::2], replies[1::2], strict=True))

    async def _erase(self, request_ids: list[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                pipeline.hdel(self._keys.request(request_id), "body", "record", "owner")
                pipeline.unlink(self._keys.journal(request_id))
            await pipeline.execute()

    async def _read_name(self, digest: str) -> tuple[str, str] | None:
        named: Any = await self._redis.hmget(self._keys.client_name(digest), ["id", "fingerprint"])
        return (named[0].decode(), named[1].decode()) if all(named) else None


def _length_of(journal: Any) -> int:
    return len(journal) if isinstance(journal, bytes) else 0


def _owner_of(fields: Any) -> bytes:
    return b"" if isinstance(fields, Exception) else fields[FIELDS.index("owner")] or b""
