"""A worker's transport on a real server, with a test clock and scripts that fail on demand."""

import asyncio
from typing import Any

from redis.exceptions import ConnectionError

from engine_worker.transport.claims import Claims
from engine_worker.transport.request_stream import RequestStream
from engine_worker.transport.token_publisher import TokenPublisher
from shared.messages import GenerationRequest, SamplingParams, encode
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand, RedisScripts

WORKER = "w0.aaaa"


class Held:
    def __init__(self) -> None:
        self.is_applied = asyncio.Event()
        self.goes_on = asyncio.Event()


class FlakyScripts(RedisScripts):
    """Calls fail on demand, before the server sees them ("refuse") or after it has applied them ("lose")."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[str] = []
        self._failures: list[tuple[str, str, Exception]] = []
        self._held: dict[str, Held] = {}

    def fail(self, script: str, when: str, times: int = 1, error: Exception | None = None) -> None:
        self._failures += [(script, when, error or ConnectionError("the reply was lost"))] * times

    def hold(self, script: str) -> "Held":
        """Apply the script's next call and hold its reply."""
        self._held[script] = held = Held()
        return held

    async def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return await self._fallible_call(name, *arguments)
        finally:
            if held := self._held.pop(name, None):
                held.is_applied.set()
                await held.goes_on.wait()

    async def _fallible_call(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        planned = next((failure for failure in self._failures if failure[0] == name), None)
        if planned is None:
            return await super()._call(name, *arguments)
        self._failures.remove(planned)
        if planned[1] == "lose":
            await super()._call(name, *arguments)
        raise planned[2]


class Clock:
    """Advances only when code sleeps with it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


class Rig:
    def __init__(self, connections: RedisConnections, keys: RedisKeys) -> None:
        self.connections = connections
        self.redis = connections.commands
        self.keys = keys
        self.scripts = FlakyScripts(connections.commands, keys)
        self.claims = Claims()
        self.clock = Clock()
        self.requests = RequestStream(connections, self.scripts, WORKER, self.claims, self.clock)
        self.tokens = TokenPublisher(self.scripts, WORKER, self.claims, clock=self.clock, sleep=self.clock.sleep)

    async def accept(self, *request_ids: str, **options: Any) -> None:
        for request_id in request_ids:
            options = {"gateway_id": "g", "priority_class": "interactive", **options}
            await self.scripts.accept(request_id, encode(make_request(request_id)), **options)

    async def claim(self, max_requests: int = 100) -> list[str]:
        return [claimed.request.request_id for claimed in await self.requests.claim(Demand(max_requests))]

    async def stored(self, request_id: str, *fields: str) -> list[Any]:
        return await self.redis.hmget(self.keys.request(request_id), list(fields))


def make_request(request_id: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=9, seed=0)
    )
