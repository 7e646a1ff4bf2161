"""Bodies of kept answers: each is built once and shared by all clients that read it at the same time.

A kept answer that has ended does not change, so its body can be shared while any client still reads it. It counts once
toward the key's share, until its last reader has it. Building a body takes several times its bytes of memory, so the
number of concurrent builds per key is limited.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web

from gateway.auth.divided_resource import DividedResource
from gateway.auth.rate_limits import Account
from gateway.http.long_body import COUNTED
from gateway.http.open_response import PIECE_BYTES

MAX_READS = 4  # concurrent reads of kept answers per key: each takes tens of megabytes until its body is built

Name: TypeAlias = tuple[str, str]  # body format, answer id


@dataclass(frozen=True, slots=True)
class BuiltBody:
    """A body, and what is needed to share it."""

    data: bytes | bytearray
    has_ended: bool  # the answer does not change any more
    num_tokens: int  # charged to each further reader; 0 if reading again is free
    is_kept: Callable[[], Awaitable[bool]]  # whether the store still has the answer


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SharedBody:
    """A built body. Its bytes count toward the key's share while any reader holds this object."""

    built: BuiltBody

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """Return a response that holds this object until the body is sent."""
        response = web.Response(body=self.built.data, content_type="application/json", headers=headers)
        if len(self.built.data) > PIECE_BYTES:
            response[COUNTED] = self
        return response


class KeptBodies:
    """The bodies of kept answers that are being sent now."""

    def __init__(self, room: DividedResource) -> None:
        """Create an empty set; `room` counts the bytes of each body until it is sent."""
        self._room = room
        self._shared = weakref.WeakValueDictionary[tuple[str, ...], SharedBody]()
        self._locks = weakref.WeakValueDictionary[tuple[str, ...], asyncio.Lock]()
        self._turns = weakref.WeakValueDictionary[str, asyncio.Semaphore]()

    def turn(self, owner_key_hash: str) -> asyncio.Semaphore:
        """Return the context in which a key reads a kept answer from the store."""
        return self._turns.setdefault(owner_key_hash, asyncio.Semaphore(MAX_READS))

    async def get(self, account: Account, name: Name, build: Callable[[], Awaitable[BuiltBody]]) -> SharedBody:
        """Return the body of this name, built by `build` unless another client is reading it.

        Raises:
            KeyShareExceeded: If the body exceeds the key's share of the bytes that may wait to be sent.
            Unavailable: If it exceeds the limit of all keys.
            RateLimited: If the key owes tokens.
            GatewayError: Any error of `build`.
        """
        owner = account.owner_key_hash
        key = (owner, *name)
        async with self._locks.setdefault(key, asyncio.Lock()), self.turn(owner):
            shared = self._shared.get(key)
            if shared is not None and await shared.built.is_kept():
                if shared.built.num_tokens:
                    account.check_debt()
                    account.spend(shared.built.num_tokens)
                return shared
            shared = SharedBody(await build())
            num_bytes = len(shared.built.data)
            if num_bytes > PIECE_BYTES:
                self._room.take(account, num_bytes)
                weakref.finalize(shared, self._room.give_back, owner, num_bytes)
                if shared.built.has_ended:
                    self._shared[key] = shared
            return shared
