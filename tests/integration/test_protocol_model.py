"""The protocol keeps its guarantees under injected faults, and every mutant of the protocol is detected.

Each mutant removes one rule. EMIT keeps zombies out by two checks, the fence and the request's claim, so the mutants of
the fence also drop the second check, and a variant shows that the fence alone suffices. Few runs produce the
interleaving that tests a second claim by the same worker: shared/test_redis_scripts.py forces it, and
guard_removals.toml proves that test.
"""

import gc
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from shared.redis_keys import RedisKeys
from shared.redis_scripts import load_sources
from tests.conftest import Valkey
from tests.integration.protocol_model import Faults, GapBlindInbox, Tally, TrustingInbox, Violation, run_world
from tests.integration.replicated_store import replicated_store

pytestmark = [
    pytest.mark.timeout(600),  # a run takes 3 CPU seconds, or two minutes beside ten busy processes
    # A kill cancels at any await; while connecting, it loses the client library's socket.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SEEDS = (20260101, *(pytest.param(seed, marks=pytest.mark.long) for seed in (7, 424242)))
STALL_SECONDS = 60.0  # for a busy machine; lost work never continues
MUTANT_STALL_SECONDS = 3.0  # a mutant that loses work is detected by its stall

OWNERSHIP = ("emit", "redis.pcall('HGET', r, 'claim') == claim_of(worker, entry)", "redis.call('EXISTS', r) == 1")
FENCE_OF_STEP = "if not stored then\n  return {'FENCED'}\nend"
NO_FENCE = ("redis.call('EXISTS', KEYS[1]) == 0", "false")
NO_FENCES = (
    ("emit", FENCE_OF_STEP, "stored = stored or step - 1"),
    ("finish", FENCE_OF_STEP, "stored = stored or step"),
    ("take", *NO_FENCE),
    ("claim", *NO_FENCE),
)


def patched(*patches: tuple[str, str, str]) -> Mapping[str, str]:
    sources = load_sources()
    for name, old, new in patches:
        assert old in sources[name], f"{name}.lua no longer holds {old!r}"
        sources[name] = sources[name].replace(old, new)
    return sources


MUTANTS = {
    "emit_without_step_check": (
        Faults(lua=patched(("emit", "stored == step\n", "false\n"), ("emit", "stored ~= step - 1", "false"))),
        "not the journal|not in the journal|unreadable|got index|not done|stalled",
    ),
    "no_fence_check": (
        Faults(
            cut_off_seconds=0,
            lua=patched(OWNERSHIP, *NO_FENCES),
        ),
        "journal|unreadable|given up|another end|not done|stalled",
    ),
    "reap_leaves_the_fence": (
        Faults(cut_off_seconds=0, lua=patched(OWNERSHIP, ("reap", "redis.call('DEL', fence)", ""))),
        "journal|unreadable|given up|another end|not done|stalled|left in the store",
    ),
    "publish_without_journal": (
        Faults(lua=patched(("emit", "type(redis.pcall('APPEND', j, ARGV[2 + 2 * i])) == 'number'", "true"))),
        "not the journal|usage|stalled",
    ),
    "publish_before_journal": (Faults(publishes_before_journal=True), "journal|got index"),
    "acknowledged_when_read": (
        Faults(
            cut_off_seconds=0,
            lua=patched(
                (
                    "take",
                    "found[#found + 1] = {reply[1][1], kept}\n",
                    "found[#found + 1] = {reply[1][1], kept}\n"
                    "for _, e in ipairs(kept) do redis.call('XACK', q, ARGV[2], e[1]) end\n",
                )
            ),
        ),
        "stalled",
    ),
    "no_gap_replay": (Faults(inbox_class=GapBlindInbox), "not the journal"),
    "lost_requests_are_published": (
        Faults(
            cut_off_seconds=0.01, lua=patched(("emit", "publish(3 + 2 * count, lost)", "publish(3 + 2 * count, {})"))
        ),
        "not the journal|not in the journal|got index",
    ),
    "unclaim_loses_requests": (
        Faults(
            cut_off_seconds=0, lua=patched(("unclaim", "requeue(entry, KEYS[2],", "requeue(entry, KEYS[2] .. '.lost',"))
        ),
        "stalled",
    ),
    "unclaim_keeps_the_old_entry": (
        Faults(cut_off_seconds=0, lua=patched(("unclaim", "'state', 'queued', 'entry', again", "'state', 'queued'"))),
        "stalled",
    ),
    "overtaking_request_keeps_its_old_entry": (
        Faults(cut_off_seconds=0, lua=patched(("take", "redis.call('HSET', r, 'entry', again)", ""))),
        "stalled",
    ),
    "overtaking_request_is_lost": (
        Faults(
            cut_off_seconds=0, lua=patched(("take", "add_after(entry, ahead,", "add_after(entry, ahead .. '.lost',"))
        ),
        "stalled",
    ),
    "entries_wait_for_homes_that_are_gone": (
        Faults(
            cut_off_seconds=0,
            lua=patched(
                ("take", "return load and load < allowed_beside(turns.load(), true) and", "return not load or")
            ),
        ),
        "stalled",
    ),
    "own_pending_entries_are_not_reread": (
        Faults(never_rereads=True, cut_off_seconds=0, num_spared_workers=3),
        "stalled",
    ),
}


FAILOVERS = Faults(failover_seconds=0.5)
MUTANTS_OF_FAILOVERS = {
    "journals_are_not_compared": (
        replace(FAILOVERS, inbox_class=TrustingInbox),
        "not the journal|got index|usage|is not done",
    ),
    "own_pending_entries_are_not_reread": (
        replace(FAILOVERS, never_rereads=True, cut_off_seconds=0, num_spared_workers=3),
        "stalled|left in the store",
    ),
}


@pytest.fixture(autouse=True)
def quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # hides thousands of lost replies


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
async def test_protocol_every_client_gets_exactly_the_journal(valkey, keys, seed):
    tally = await world(valkey, keys, seed, Faults(), STALL_SECONDS)
    # The test proves nothing unless the faults happened.
    assert min(tally.kills, tally.crashes, tally.fenced, tally.cancels, tally.cut_offs, tally.dead_letters) > 0
    assert tally.given_back > 10 and tally.homes > 0
    assert min(tally.lost_replies, tally.lost_messages, tally.journal_reads, tally.repeated_tokens) > 50
    assert tally.innocent_dead_letters < tally.requests / 50


async def test_protocol_fence_alone_keeps_zombies_out(valkey, keys):
    await world(valkey, keys, 11, Faults(cut_off_seconds=0, lua=patched(OWNERSHIP)), STALL_SECONDS, 8)


async def test_protocol_claim_alone_keeps_old_attempt_out(valkey, keys):
    await world(valkey, keys, 12, Faults(claims_what_runs=True), STALL_SECONDS, 8)


@pytest.mark.parametrize("name", MUTANTS)
async def test_protocol_mutant_is_detected(valkey, keys, name):
    faults, symptom = MUTANTS[name]
    # If a stall is not the symptom, a busy machine must not cause one.
    stall_seconds = MUTANT_STALL_SECONDS if "stalled" in symptom else STALL_SECONDS
    with pytest.raises(Violation, match=symptom) as caught:
        for seed in range(3):  # not every run has zombies
            await world(valkey, RedisKeys(f"{keys.model_name}-{seed}"), seed, faults, stall_seconds)
    print(f"{name}: {caught.value}")


async def failing_world(directory: Path, keys: RedisKeys, seed: int, faults: Faults, stall_seconds: float) -> Tally:
    print(f"seed {seed}")
    async with replicated_store(directory) as store:
        tally = await run_world(
            store.url,
            keys,
            seed=seed,
            num_clients=24,
            requests_per_client=16,
            faults=faults,
            stall_seconds=stall_seconds,
            store=store,
        )
    print(tally)
    return tally


@pytest.mark.parametrize("seed", SEEDS)
async def test_protocol_failovers_to_a_late_replica_change_no_stream(tmp_path: Path, keys: RedisKeys, seed: int):
    tally = await failing_world(tmp_path, keys, seed, FAILOVERS, STALL_SECONDS)
    assert min(tally.kills, tally.fenced, tally.failovers) > 0
    assert tally.torn < tally.requests / 10


@pytest.mark.parametrize("name", MUTANTS_OF_FAILOVERS)
async def test_protocol_mutant_of_failovers_is_detected(tmp_path: Path, keys: RedisKeys, name: str):
    faults, symptom = MUTANTS_OF_FAILOVERS[name]
    stall_seconds = MUTANT_STALL_SECONDS if "stalled" in symptom else STALL_SECONDS
    with pytest.raises(Violation, match=symptom) as caught:
        for seed in range(3):
            await failing_world(tmp_path, RedisKeys(f"{keys.model_name}-{seed}"), seed, faults, stall_seconds)
    print(f"{name}: {caught.value}")
