"""What an observer hears of commands, on a real server."""

import pytest
from redis.exceptions import ResponseError

from shared.redis_client import connect
from tests.conftest import Valkey


async def test_an_observer_hears_of_each_command_and_of_its_failure(valkey: Valkey) -> None:
    heard = []
    connections = connect(valkey.url, observe=lambda command, seconds, failed: heard.append((command, seconds, failed)))
    try:
        await connections.commands.set("x", "text")
        with pytest.raises(ResponseError):
            await connections.commands.incr("x")
    finally:
        await connections.aclose()
    assert [(command, failed) for command, _, failed in heard] == [("SET", False), ("INCRBY", True)]
    assert all(0 < seconds < 10 for _, seconds, _ in heard)
