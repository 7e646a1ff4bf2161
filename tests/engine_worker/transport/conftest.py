"""Fixtures: a registered worker and a subscriber to a channel."""

from collections.abc import Callable
from typing import Any

import pytest

from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from tests.engine_worker.transport.rig import WORKER, Rig
from tests.patience import PATIENCE_SECONDS


@pytest.fixture
async def rig(connections: RedisConnections, keys: RedisKeys) -> Rig:
    rig = Rig(connections, keys)
    await rig.scripts.register(WORKER)
    return rig


@pytest.fixture
def heard(connections: RedisConnections) -> Callable[[str], Any]:
    """Return an async context manager that subscribes to a channel; `next()` awaits its next message."""

    class Heard:
        def __init__(self, channel: str) -> None:
            self.channel = channel
            self.pubsub = connections.subscriber.pubsub()

        async def __aenter__(self) -> "Heard":
            await self.pubsub.subscribe(self.channel)
            await self.pubsub.get_message(timeout=PATIENCE_SECONDS)
            return self

        async def __aexit__(self, *_: object) -> None:
            await self.pubsub.aclose()

        async def next(self) -> bytes:
            message = await self.pubsub.get_message(timeout=PATIENCE_SECONDS)
            assert message is not None, f"nothing came on {self.channel}"
            return message["data"]

    return Heard
