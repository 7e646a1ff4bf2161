"""Dead letters, the requests that repeatedly crashed their workers: list, find, retry, and drop them.

REAP writes a dead letter (shared/redis_scripts/reap.lua) after its client got an error event. It contains the request
id and the cause. The request's body, which contains the prompt, stays in the store for KEEP_DEAD_SECONDS.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis

from shared.capabilities import needs_of
from shared.messages import FormatError, GenerationRequest, decode_request
from shared.new_requests import NewRequest
from shared.redis_keys import NEWER, RedisKeys
from shared.redis_scripts import RedisScripts

LISTED_LETTERS = 1000  # REAP keeps about as many


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    letter_id: str  # id of the stream entry: milliseconds of the server's clock, and a number
    request_id: str
    worker_id: str  # the last worker that crashed
    attempts: int
    strikes: int  # crashes without a new token
    journal_bytes: int  # 0: no token was generated

    @property
    def died_at_unix_seconds(self) -> float:
        return int(self.letter_id.split("-")[0]) / 1000


class NoSuchLetter(LookupError):
    """The request has no dead letter, or its body is gone; the message says which."""


class DeadLetters:
    def __init__(self, redis: Redis, keys: RedisKeys) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = RedisScripts(redis, keys)

    async def list(self) -> list[DeadLetter]:
        """Return all letters, newest first."""
        entries: Any = await self._redis.xrevrange(self._keys.dead_letters, count=LISTED_LETTERS)
        return [_letter(entry_id, fields) for entry_id, fields in entries]

    async def find(self, request_id: str) -> DeadLetter:
        for letter in await self.list():
            if letter.request_id == request_id:
                return letter
        raise NoSuchLetter(f"no dead letter of request {request_id}")

    async def request(self, letter: DeadLetter) -> GenerationRequest:
        """Return the request of `letter`.

        Raises:
            NoSuchLetter: If it has expired, or cannot be decoded.
        """
        body: Any = await self._redis.hget(self._keys.request(letter.request_id), "body")
        if body is None:
            raise NoSuchLetter(f"the body of request {letter.request_id} has expired")
        try:
            return decode_request(body)
        except FormatError as error:
            raise NoSuchLetter(f"the body of request {letter.request_id} cannot be read: {error}") from error

    async def retry(self, letter: DeadLetter) -> str:
        """Queue the request from its start under a new id, and drop the letter. Returns the new id.

        No client streams the answer; it can be read in the store for RETAINED_SECONDS after its end.
        """
        request = msgspec.structs.replace(await self.request(letter), request_id=secrets.token_hex(16))
        new, queue_name = NewRequest.of(request), NEWER if needs_of(request) else ""
        await self._scripts.accept_all(
            [new], gateway_id="", priority_class=request.priority_class, queue_name=queue_name
        )
        await self.drop(letter)
        return request.request_id

    async def drop(self, letter: DeadLetter) -> None:
        """Delete the letter, and the body and tokens of its request."""
        await self._redis.xdel(self._keys.dead_letters, letter.letter_id)
        await self._redis.unlink(self._keys.request(letter.request_id), self._keys.journal(letter.request_id))


def _letter(entry_id: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        letter_id=entry_id.decode(),
        request_id=fields[b"r"].decode(),
        worker_id=fields[b"worker"].decode(),
        attempts=int(fields[b"attempts"]),
        strikes=int(fields[b"strikes"]),
        journal_bytes=int(fields[b"journal_bytes"]),
    )
