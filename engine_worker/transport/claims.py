"""The requests that this worker incarnation has claimed and not yet finished.

Shared by RequestStream, which adds, and TokenPublisher, which removes. Knows no Redis and decides nothing.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from shared.messages import GenerationRequest, StoredChoice


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    request: GenerationRequest
    stored: list[StoredChoice]  # the choices as earlier attempts left them: the engine continues behind them
    gateway_id: str
    attempt: int
    queue: str
    entry_id: bytes
    solo: bool  # suspected of crashing workers: runs alone


class Claims:
    def __init__(self) -> None:
        self._by_request_id: dict[str, ClaimedRequest] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_request_id)

    def __iter__(self) -> Iterator[ClaimedRequest]:
        return iter(self._by_request_id.values())

    @property
    def runs_solo(self) -> bool:
        return any(claim.solo for claim in self)

    def get(self, request_id: str) -> ClaimedRequest | None:
        return self._by_request_id.get(request_id)

    def add(self, claim: ClaimedRequest) -> None:
        self._by_request_id[claim.request.request_id] = claim

    def remove(self, request_id: str) -> None:
        del self._by_request_id[request_id]
        self._changed.set()

    async def wait_until_one_ends(self, timeout_seconds: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
