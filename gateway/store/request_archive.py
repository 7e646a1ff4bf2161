"""Requests in the store, running or ended, read by id or by client name: the request, its progress, and its end.

Data that cannot be decoded raises FormatError.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from redis.asyncio import Redis

from gateway.store.store_calls import StoreCalls, StoreUnavailable
from gateway.store.stream_table import StreamTable
from gateway.work.reader_pool import ReaderPool
from shared.messages import (
    FinishEvent,
    FormatError,
    GenerationRequest,
    StoredChoice,
    TerminalEvent,
    decode_request,
    decode_terminal_event,
    journal_choices,
)
from shared.redis_keys import RedisKeys

STORED_END = ("state", "terminal", "orphaned")  # of the hash {m}:r:<id>
FIELDS = (*STORED_END, "body", "owner", "record", "asked")
DECODING_THREADS = 3
_Decoded = TypeVar("_Decoded")


@dataclass(frozen=True, slots=True)
class StoredRequest:
    request: GenerationRequest
    state: str  # queued | running | done
    owner_key_hash: str
    record: bytes  # empty for a request that is not kept
    num_tokens: int  # of all choices so far; not the tokens themselves, which can be megabytes
    terminal: TerminalEvent | None
    was_cancelled: bool = False  # by an explicit cancel, not because its readers had gone


class RequestArchive:
    def __init__(self, redis: Redis, keys: RedisKeys, calls: StoreCalls, streams: StreamTable) -> None:
        """Create the archive; of requests with a current reader among `streams`, no journal is read for its length."""
        self._streams = streams
        self._redis = redis
        self._keys = keys
        self._calls = calls
        self._pool = ReaderPool(max_readers=DECODING_THREADS)

    async def stored(self, request_ids: Iterable[str]) -> list[StoredRequest | None]:
        """Return the requests with these ids, in order; None for each that the store does not have.

        Raises:
            StoreUnavailable: If the store does not answer.
            FormatError: If a stored request is unreadable.
        """
        ids = list(request_ids)
        known = {id_: num_tokens for id_ in ids if (num_tokens := self._streams.num_tokens_of(id_)) is not None}
        replies = await self._calls.ask(self.read(ids, FIELDS, without_journal=known))
        return [
            await self.decode(
                _owner_of(fields), _length_of(journal), partial(stored_request, fields, journal, known.get(id_))
            )
            for id_, (fields, journal) in zip(ids, replies, strict=True)
        ]

    async def keeps(self, request_id: str) -> bool:
        """Return whether the request and its answer are still stored. Raise StoreUnavailable."""
        (owner,) = await self._ask(self._redis.hmget(self._keys.request(request_id), ["owner"]))
        return owner is not None

    async def decoded(
        self, request: GenerationRequest, stored: Any, journal: Any, known: Sequence[int] = ()
    ) -> tuple[list[StoredChoice], TerminalEvent | None]:
        """Return stored_answer(); long ones are decoded in a thread. Raise FormatError."""
        work = partial(stored_answer, request, stored, journal, known)
        return await self.decode(request.tenant, _length_of(journal), work)

    async def decode(self, key: Hashable, num_bytes: int, decode: Callable[[], _Decoded]) -> _Decoded:
        """Return or raise what `decode` does; run it in a thread if `num_bytes` is large.

        A token with log-probabilities takes 20 us. Work of one key waits only for other work of the same key.
        """
        return await self._pool.run(key, num_bytes, decode)

    def close(self) -> None:
        self._pool.close()

    async def erase(self, request_ids: Iterable[str]) -> None:
        """Erase the content of requests that have ended, and their answers.

        Their end stays a while longer, for gateways that still read them. Raise StoreUnavailable.
        """
        await self._calls.ask(self._erase(list(request_ids)))

    async def named(self, digest: str) -> tuple[str, str] | None:
        """Return (id, fingerprint) of the request that has this client's name, or None. Raise StoreUnavailable."""
        named = await self._ask(self._redis.hmget(self._keys.client_name(digest), ["id", "fingerprint"]))
        return (named[0].decode(), named[1].decode()) if all(named) else None

    async def forget(self, request_ids: Iterable[str], name: str) -> None:
        """Delete requests that have ended, and their client's name. What is not deleted now expires by itself."""
        keys = [key for id_ in request_ids for key in (self._keys.request(id_), self._keys.journal(id_))]
        with suppress(StoreUnavailable):
            await self._ask(self._redis.unlink(*keys, self._keys.client_name(name)))

    async def _ask(self, command: Any) -> Any:
        """Return the reply of a command of redis-py, whose types allow no coroutine."""
        return await self._calls.ask(command)

    async def read(
        self, request_ids: list[str], fields: Iterable[str], without_journal: Container[str] = ()
    ) -> list[tuple[Any, Any]]:
        """Return fields of the hash, and the journal, of each request; either may be the server's error.

        The journal of a request in `without_journal` is not read; it is None.

        The hash is read first: if it contains the end, the journal read after it is complete. Call it only from the
        gateway's own tasks, which are not cancelled with a client.
        """
        are_read = [request_id not in without_journal for request_id in request_ids]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for request_id, is_read in zip(request_ids, are_read, strict=True):
                pipeline.hmget(self._keys.request(request_id), list(fields))
                if is_read:
                    pipeline.get(self._keys.journal(request_id))
            replies = iter(await pipeline.execute(raise_on_error=False))
        return [(next(replies), next(replies) if is_read else None) for is_read in are_read]

    async def _erase(self, request_ids: list[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                pipeline.hdel(self._keys.request(request_id), "body", "record", "owner")
                pipeline.unlink(self._keys.journal(request_id))
            await pipeline.execute()


def _length_of(journal: Any) -> int:
    return len(journal) if isinstance(journal, bytes) else 0


def _owner_of(fields: Any) -> bytes:
    return b"" if isinstance(fields, Exception) else fields[FIELDS.index("owner")] or b""


def is_missing(stored: Any) -> bool:
    """Return whether the store has no such request; `stored` is field values, state first, or the server's error."""
    return isinstance(stored, list) and stored[0] is None


def is_orphaned(stored: Any) -> bool:
    """Return whether the request has ended only because the gateways of all its readers were gone."""
    return isinstance(stored, list) and stored[STORED_END.index("orphaned")] is not None


def stored_answer(
    request: GenerationRequest, stored: Any, journal: Any, known: Sequence[int] = ()
) -> tuple[list[StoredChoice], TerminalEvent | None]:
    """Decode an answer: its choices and its end, if it has ended.

    Args:
        request: The request.
        stored: Values of STORED_END, or the server's error.
        journal: The journal's bytes, None, or the server's error.
        known: See journal_choices().

    Raises:
        FormatError: If anything is unreadable, or is an error.
    """
    for reply in (stored, journal):
        if isinstance(reply, Exception):
            raise FormatError(str(reply)) from reply
    choices = journal_choices(journal or b"", request.sampling.n, known)
    if stored[0] != b"done":
        return choices, None
    terminal = decode_terminal_event(stored[1] or b"")
    if terminal.request_id != request.request_id:
        raise FormatError(f"the stored end belongs to request {terminal.request_id}")
    return choices, terminal


def stored_request(
    fields: Sequence[Any] | Exception, journal: Any, num_tokens: int | None = None
) -> StoredRequest | None:
    """Decode the values of FIELDS; None if the store does not have the request. Raise FormatError.

    Args:
        fields: The values, or the server's error.
        journal: The journal's bytes, None, or the server's error.
        num_tokens: Generated tokens that a reader has, which may lack the last ones; None: those of the journal.
    """
    if isinstance(fields, Exception):
        raise FormatError(str(fields)) from fields
    state, _, _, body, owner, record, asked = fields
    if body is None:
        return None
    request = decode_request(body)
    choices, terminal = stored_answer(request, fields, journal)
    if isinstance(terminal, FinishEvent):
        num_tokens = terminal.usage.completion_tokens
    elif num_tokens is None:
        num_tokens = sum(len(choice.token_ids) for choice in choices)
    return StoredRequest(
        request, state.decode(), (owner or b"").decode(), record or b"", num_tokens, terminal, asked is not None
    )
