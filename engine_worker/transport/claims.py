"""The requests that a worker incarnation has claimed and not finished.

RequestStream adds them; TokenPublisher removes them.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shared.messages import GenerationRequest, StoredChoice


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    request: GenerationRequest
    stored: list[StoredChoice]  # the choices of earlier attempts, after which the engine continues
    gateway_id: str
    attempt: int
    queue: str
    entry_id: bytes
    solo: bool  # suspected of crashing workers: runs alone
    queued_ms: int = 0  # time of entering the queue, by the store's clock
    more_gateway_ids: tuple[str, ...] = ()  # gateways that attached later
    flow: str = ""  # the key that orders it in the queue
    home: str = ""  # the worker that probably has its prefix in its cache; "": none

    @property
    def gateway_ids(self) -> tuple[str, ...]:
        return (self.gateway_id, *self.more_gateway_ids)


MAX_GATEWAYS = 4  # gateways that receive the events of one request; earlier ones read its journal


class Claims:
    def __init__(self) -> None:
        self._by_request_id: dict[str, ClaimedRequest] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_request_id)

    def __iter__(self) -> Iterator[ClaimedRequest]:
        return iter(self._by_request_id.values())

    def __getitem__(self, request_id: str) -> ClaimedRequest:
        return self._by_request_id[request_id]

    @property
    def runs_solo(self) -> bool:
        """Whether a request that must run alone is claimed; then it is the only one."""
        return len(self) == 1 and next(iter(self)).solo

    def get(self, request_id: str) -> ClaimedRequest | None:
        return self._by_request_id.get(request_id)

    def add(self, claim: ClaimedRequest) -> None:
        self._by_request_id[claim.request.request_id] = claim

    def attach(self, request_id: str, gateway_id: str) -> None:
        """Send the events of a request to this gateway too. Unknown ids are ignored."""
        claim = self._by_request_id.get(request_id)
        if claim is not None and gateway_id not in claim.gateway_ids:
            more = (*claim.more_gateway_ids, gateway_id)[1 - MAX_GATEWAYS :]
            self._by_request_id[request_id] = replace(claim, more_gateway_ids=more)

    def remove(self, request_id: str) -> None:
        del self._by_request_id[request_id]
        self._changed.set()

    async def wait_until_one_ends(self, timeout_seconds: float) -> None:
        """Wait until a request is removed, or until the timeout."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
