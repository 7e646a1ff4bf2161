"""Entry ids are compared as Redis orders them (entries.lua)."""

from itertools import product
from pathlib import Path

from redis.asyncio import Redis

import shared
from shared.redis_client import RedisConnections

ENTRIES = Path(shared.__file__).parent / "redis_scripts" / "entries.lua"
TIMES = (0, 9, 10, 1_764_424_000_000, 1_764_424_000_001, 9_999_999_999_999, 10_000_000_000_000)
NUMBERS = (0, 1, 9, 10, 19, 20, 100)


async def test_ids_are_ordered_by_their_numbers(connections: RedisConnections) -> None:
    redis: Redis = connections.commands
    numbers = list(product(TIMES, NUMBERS))
    ids = [f"{milliseconds}-{number}" for milliseconds, number in numbers]
    script = ENTRIES.read_text() + (
        "local found = {} "
        "for i, entry in ipairs(ARGV) do for j, other in ipairs(ARGV) do "
        "found[#found + 1] = entry_is_after(entry, other) and 1 or 0 "
        "end end return found"
    )
    found = await redis.eval(script, 0, *ids)
    assert found == [int(entry > other) for entry, other in product(numbers, numbers)]
