"""Pure functions that share batches and slots among owners."""

import asyncio

import pytest

from gateway.batches.driver.fair_slots import TURN_SECONDS, FairSlots, Turn, batch_to_yield


def turns(*owners: str) -> list[Turn]:
    return [Turn(f"{owner}{number}", owner, float(number)) for number, owner in enumerate(owners)]


@pytest.mark.parametrize(
    ("driven", "owner", "seconds", "leaver"),
    [
        ("aaaa", "b", 4, "a3"),  # the latest batch: it has the least to lose
        ("aaaa", "a", 999, None),
        ("aaab", "b", 4, "a2"),
        ("aabb", "b", 999, None),
        ("aab", "c", 4, "a1"),
        ("ab", "c", TURN_SECONDS, "a0"),  # everyone has one: the batch whose time slice is over
        ("ab", "c", TURN_SECONDS - 1, None),
        ("ab", "b", 999, None),
        ("", "a", 0, None),
    ],
)
def test_batch_to_yield_is_of_the_largest_owner(driven: str, owner: str, seconds: float, leaver: str | None) -> None:
    found = batch_to_yield(turns(*driven), owner, seconds)
    assert (found and found.batch_id) == leaver


@pytest.mark.parametrize("num_owners", [2, 3, 5, 16])
def test_repeated_yields_end_with_equal_shares(num_owners: int) -> None:
    driven = turns(*"a" * 16)
    owners = [chr(ord("a") + number) for number in range(num_owners)]
    for step in range(100):
        owner = min(owners, key=lambda owner: sum(turn.owner == owner for turn in driven))
        leaver = batch_to_yield(driven, owner, 0.0)
        if leaver is None:
            break
        driven.remove(leaver)
        driven.append(Turn(f"new{step}", owner, 100.0 + step))
    counts = [sum(turn.owner == owner for turn in driven) for owner in owners]
    assert sum(counts) == 16 and max(counts) - min(counts) <= 1


class Lines:
    """Tasks that hold a slot until the test ends them."""

    def __init__(self, slots: FairSlots) -> None:
        self.slots = slots
        self.running: list[str] = []
        self.ends: list[tuple[str, asyncio.Event]] = []

    async def run(self, owner: str) -> None:
        async with self.slots.held(owner):
            end = asyncio.Event()
            self.running.append(owner)
            self.ends.append((owner, end))
            await end.wait()
            self.running.remove(owner)

    async def end(self, owner: str) -> None:
        found = next(pair for pair in self.ends if pair[0] == owner)
        self.ends.remove(found)
        found[1].set()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_freed_slot_goes_to_the_owner_with_the_fewest() -> None:
    lines = Lines(FairSlots(16, has_owners=True))
    tasks = [asyncio.create_task(lines.run("a")) for _ in range(100)]
    await settled()
    assert lines.running == ["a"] * 14
    tasks += [asyncio.create_task(lines.run("b")) for _ in range(100)]
    await settled()
    assert lines.running.count("b") == 1  # at once
    for _ in range(7):
        await lines.end("a")
    assert (lines.running.count("a"), lines.running.count("b")) == (7, 7)
    await lines.end("b")
    assert (lines.running.count("a"), lines.running.count("b")) == (7, 7)
    tasks += [asyncio.create_task(lines.run(owner)) for owner in "ccd"]
    await settled()
    assert (lines.running.count("c"), lines.running.count("d")) == (1, 1)  # at once, although two owners want all slots
    await lines.end("a")
    await lines.end("a")
    assert (lines.running.count("a"), lines.running.count("c")) == (5, 1)  # the reserve is refilled first
    await lines.end("b")
    assert (lines.running.count("b"), lines.running.count("c")) == (6, 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    free = asyncio.create_task(lines.run("c"))
    await settled()
    assert lines.slots._num_free == 15 and lines.slots._held == {"c": 1} and not lines.slots._waiting
    free.cancel()


@pytest.mark.parametrize(
    ("num_slots", "has_owners", "max_held"), [(1, True, 1), (2, True, 1), (64, True, 56), (8, False, 8)]
)
async def test_lone_owner_gets_all_but_the_reserve(num_slots: int, has_owners: bool, max_held: int) -> None:
    lines = Lines(FairSlots(num_slots, has_owners=has_owners))
    tasks = [asyncio.create_task(lines.run("a")) for _ in range(num_slots + 1)]
    await settled()
    assert len(lines.running) == max_held
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
