"""Observers reap every worker that has ended and none that lives, and each mutant of their rules is detected."""

import pytest

from engine_worker.transport.presence import Presence
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import load_sources
from tests.integration.observer_model import Mutation, Violation, run_site

SEEDS = (1, 20, 300)
ROUNDS = 12


class NeverDoubting(Presence):
    """Judges silence although it may have been away itself."""

    @property
    def is_steady(self) -> bool:
        return True


class WithoutLosses(Presence):
    """Does not notice that the store did not answer, or that the clock jumped."""

    def _record(self, fleet_seconds: float) -> None:
        super()._record(fleet_seconds)
        self._steady_since = 0.0


def patched(old: str, new: str) -> Mutation:
    sources = load_sources()
    assert old in sources["tick"], f"tick.lua no longer holds {old!r}"
    return Mutation({**sources, "tick": sources["tick"].replace(old, new)})


MUTANTS = {
    "lease_never_ends": (patched("until_ms < now or until_ms > now + lease", "until_ms == 0"), "liveness"),
    "beats_are_not_stored": (patched("redis.call('ZADD', beats, now, id)", ""), "liveness|safety"),
    "clock_stands_still": (patched("string.format('%d', now))\nlocal beats", "0)\nlocal beats"), "liveness|safety"),
    "observer_never_doubts": (Mutation(presence_class=NeverDoubting), "safety"),
    "observer_notices_no_loss": (Mutation(presence_class=WithoutLosses), "safety"),
}


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_ended_are_reaped_and_the_living_are_not(
    connections: RedisConnections, keys: RedisKeys, seed: int
) -> None:
    # The test proves nothing unless workers were silent for long.
    assert await run_site(connections, keys, seed, Mutation(), ROUNDS) > 0


@pytest.mark.parametrize("name", MUTANTS)
async def test_mutant_is_detected(connections: RedisConnections, keys: RedisKeys, name: str) -> None:
    mutation, symptom = MUTANTS[name]
    with pytest.raises(Violation, match=symptom):
        for seed in range(5):
            await run_site(connections, RedisKeys(f"{keys.model_name}-{seed}"), seed, mutation, ROUNDS)
