"""Bodies of kept answers: each is built once, and shared by all who read it at the same time.

A kept answer that has ended does not change, so its body can be shared for as long as somebody still writes it. The
body counts once for the key, until its last reader has it. To build a body takes several times its bytes, so one key
builds a few at a time.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web

from gateway.auth.rate_limits import Account
from gateway.divided_resource import DividedResource
from gateway.http.event_stream import PIECE_BYTES
from gateway.http.long_body import COUNTED

MAX_READS = 4  # of kept answers, by one key at a time: each holds tens of megabytes until its body is built

Name: TypeAlias = tuple[str, str]  # the form of the body, and the id of its answer


@dataclass(frozen=True, slots=True)
class BuiltBody:
    """A body, and what sharing it needs."""

    data: bytes | bytearray
    has_ended: bool  # nothing of the answer changes any more
    num_tokens: int  # charged to each further reader; 0: reading it again is free
    is_kept: Callable[[], Awaitable[bool]]  # whether the store still has the answer


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _SharedBody:
    built: BuiltBody


class KeptBodies:
    """The bodies of kept answers that are being written now."""

    def __init__(self, room: DividedResource) -> None:
        """`room`: counts the bytes of each body until it is written."""
        self._room = room
        self._shared = weakref.WeakValueDictionary[tuple[str, ...], _SharedBody]()
        self._locks = weakref.WeakValueDictionary[tuple[str, ...], asyncio.Lock]()
        self._turns = weakref.WeakValueDictionary[str, asyncio.Semaphore]()

    def turn(self, owner_key_hash: str) -> asyncio.Semaphore:
        """Return the context in which a key reads a kept answer from the store."""
        return self._turns.setdefault(owner_key_hash, asyncio.Semaphore(MAX_READS))

    async def respond(
        self,
        account: Account,
        name: Name,
        build: Callable[[], Awaitable[BuiltBody]],
        headers: dict[str, str] | None = None,
    ) -> web.Response:
        """Return a response with the body of this name, built by `build` unless somebody is reading it.

        Raises:
            KeyShareExceeded, Unavailable: If its bytes are more than may wait to be sent.
            RateLimited: If the key owes tokens.
            GatewayError: What `build` raises.
        """
        shared = await self._get(account, name, build)
        response = web.Response(body=shared.built.data, content_type="application/json", headers=headers)
        if len(shared.built.data) > PIECE_BYTES:
            response[COUNTED] = shared
        return response

    async def _get(self, account: Account, name: Name, build: Callable[[], Awaitable[BuiltBody]]) -> _SharedBody:
        owner = account.owner_key_hash
        key = (owner, *name)
        async with self._locks.setdefault(key, asyncio.Lock()), self.turn(owner):
            shared = self._shared.get(key)
            if shared is not None and await shared.built.is_kept():
                if shared.built.num_tokens:
                    account.check_debt()
                    account.spend(shared.built.num_tokens)
                return shared
            shared = _SharedBody(await build())
            num_bytes = len(shared.built.data)
            if num_bytes > PIECE_BYTES:
                self._room.take(account, num_bytes)
                weakref.finalize(shared, self._room.give_back, owner, num_bytes)
                if shared.built.has_ended:
                    self._shared[key] = shared
            return shared
