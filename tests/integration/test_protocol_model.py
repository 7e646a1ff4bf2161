"""The protocol keeps its promises in a world of faults, and the test would notice if it did not.

Each mutant removes one rule; a world that does not catch it proves nothing about that rule. EMIT checks two things that
each keep a zombie out, the fence and the request's `worker` field: the mutants of the fence therefore drop the second
check too, and a variant shows that the fence alone is enough. That a second claim of a worker takes no token of the
first needs an interleaving that few worlds have: shared/test_redis_scripts.py forces it, guard_removals.toml proves it.
"""

import gc
import logging
from collections.abc import Iterator, Mapping

import pytest

from shared.redis_keys import RedisKeys
from shared.redis_scripts import load_sources
from tests.conftest import Valkey
from tests.integration.protocol_model import Faults, Tally, Violation, run_world

pytestmark = [
    pytest.mark.timeout(600),  # a world takes 3 CPU seconds, which ten busy neighbours make two minutes
    # A kill is a cancel at any await; in the middle of connecting it loses the client library's socket.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SEEDS = (20260101, 7, 424242)
STALL_SECONDS = 60.0  # of a machine that does something else; what is lost stays lost
MUTANT_STALL_SECONDS = 3.0  # a mutant that loses work is caught by standing still

OWNERSHIP = ("emit", "redis.pcall('HGET', r, 'claim') == entry", "redis.call('EXISTS', r) == 1")
NO_FENCE_IN_EMIT = ("emit", "if not stored then\n  return {'FENCED'}\nend", "stored = stored or step - 1")
NO_FENCE = ("redis.call('EXISTS', KEYS[1]) == 0", "false")


def patched(*patches: tuple[str, str, str]) -> Mapping[str, str]:
    sources = load_sources()
    for name, old, new in patches:
        assert old in sources[name], f"{name}.lua no longer holds {old!r}"
        sources[name] = sources[name].replace(old, new)
    return sources


MUTANTS = {
    "no step check in EMIT": (
        Faults(lua=patched(("emit", "stored == step\n", "false\n"), ("emit", "stored ~= step - 1", "false"))),
        "not the journal|not in the journal|unreadable|got index|not done|stalled",
    ),
    "no fence check": (
        Faults(
            cut_off_seconds=0,
            lua=patched(OWNERSHIP, NO_FENCE_IN_EMIT, *((name, *NO_FENCE) for name in ("take", "claim", "finish"))),
        ),
        "journal|unreadable|given up|another end|not done|stalled",
    ),
    "REAP leaves the fence": (
        Faults(cut_off_seconds=0, lua=patched(OWNERSHIP, ("reap", "redis.call('DEL', fence)", ""))),
        "journal|unreadable|given up|another end|not done|stalled|left in the store",
    ),
    "publish without journal": (
        Faults(lua=patched(("emit", "type(redis.pcall('APPEND', j, ARGV[2 + 2 * i])) == 'number'", "true"))),
        "not the journal|usage|stalled",
    ),
    "publish before journal": (Faults(publishes_before_journal=True), "journal|got index"),
    "acknowledged when read": (
        Faults(
            cut_off_seconds=0,
            lua=patched(
                (
                    "take",
                    "found[#found + 1] = reply[1]\n",
                    "found[#found + 1] = reply[1]\n"
                    "for _, e in ipairs(reply[1][2]) do redis.call('XACK', q, ARGV[2], e[1]) end\n",
                )
            ),
        ),
        "stalled",
    ),
    "no gap replay": (Faults(ignores_gaps=True), "not the journal"),
    "what is not the worker's is published": (
        Faults(
            cut_off_seconds=0.01, lua=patched(("emit", "publish(3 + 2 * count, lost)", "publish(3 + 2 * count, {})"))
        ),
        "not the journal|not in the journal|got index",
    ),
    "UNCLAIM loses what it gives back": (
        Faults(cut_off_seconds=0, lua=patched(("unclaim", "'XADD', KEYS[2],", "'XADD', KEYS[2] .. '.lost',"))),
        "stalled",
    ),
    "UNCLAIM leaves the request with its old entry": (
        Faults(cut_off_seconds=0, lua=patched(("unclaim", "'state', 'queued', 'entry', again", "'state', 'queued'"))),
        "stalled",
    ),
    "a request whose turn comes early keeps its old entry": (
        Faults(cut_off_seconds=0, lua=patched(("take", "redis.call('HSET', r, 'entry', again)", ""))),
        "stalled",
    ),
    "a request whose turn comes early is lost": (
        Faults(cut_off_seconds=0, lua=patched(("take", "'XADD', ahead,", "'XADD', ahead .. '.lost',"))),
        "stalled",
    ),
    "own pending entries are not read again": (
        Faults(never_rereads=True, cut_off_seconds=0, num_spared_workers=3),
        "stalled",
    ),
}


@pytest.fixture(autouse=True)
def quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # thousands of lost replies


@pytest.fixture(autouse=True)
def lost_sockets_are_collected_here() -> Iterator[None]:
    yield
    gc.collect()


async def world(
    valkey: Valkey, keys: RedisKeys, seed: int, faults: Faults, stall_seconds: float, requests_per_client: int = 16
) -> Tally:
    print(f"seed {seed}")
    tally = await run_world(
        valkey.url,
        keys,
        seed=seed,
        num_clients=24,
        requests_per_client=requests_per_client,
        faults=faults,
        stall_seconds=stall_seconds,
    )
    print(tally)
    return tally


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_client_gets_exactly_the_journal(valkey, keys, seed):
    tally = await world(valkey, keys, seed, Faults(), STALL_SECONDS)
    # The faults did happen, or the test has shown nothing.
    assert min(tally.kills, tally.crashes, tally.fenced, tally.cancels, tally.cut_offs, tally.dead_letters) > 0
    assert tally.given_back > 10
    assert min(tally.lost_replies, tally.lost_messages, tally.journal_reads, tally.repeated_tokens) > 50
    assert tally.innocent_dead_letters < tally.requests / 50


async def test_the_fence_alone_keeps_zombies_out(valkey, keys):
    await world(valkey, keys, 11, Faults(cut_off_seconds=0, lua=patched(OWNERSHIP)), STALL_SECONDS, 8)


async def test_the_claim_alone_keeps_the_attempt_before_out(valkey, keys):
    await world(valkey, keys, 12, Faults(claims_what_runs=True), STALL_SECONDS, 8)


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_mutant_is_caught(valkey, keys, name):
    faults, symptom = MUTANTS[name]
    # Where standing still is no symptom, a busy machine must not pass for it.
    stall_seconds = MUTANT_STALL_SECONDS if "stalled" in symptom else STALL_SECONDS
    with pytest.raises(Violation, match=symptom) as caught:
        for seed in range(3):  # zombies do not come in every world
            await world(valkey, RedisKeys(f"{keys.model_name}-{seed}"), seed, faults, stall_seconds)
    print(f"{name}: {caught.value}")
