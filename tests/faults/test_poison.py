"""A request that kills every worker ends alone: as a dead letter, with one error event."""

import asyncio
from typing import Any

import pytest

from shared.dead_letters import DeadLetters
from shared.messages import ErrorEvent, GenerationRequest, TokenEvent
from shared.reaping import reap_workers_with_prefix
from tests.builders import expected_output, make_request
from tests.e2e.fleet import STOP_SECONDS
from tests.faults.conftest import StartWorld, World
from tests.inbox_reader import InboxReader

POISON = 1  # in no neighbor's prompt: prompts of the builders begin at token 3


async def outlive(world: World, *flags: str, until: "asyncio.Future[list[Any]]") -> int:
    """Restart the worker after each crash as a supervisor does; return the number of crashes."""
    num_deaths = 0
    while True:
        name = f"w{num_deaths}"
        worker = world.start_worker(name, "--script-poison-token", str(POISON), *flags)
        death = asyncio.create_task(asyncio.to_thread(worker.wait))
        either: set[asyncio.Future[Any]] = {death, until}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=STOP_SECONDS)
        if not death.done():
            assert until.done(), "neither dead nor done"
            until.result()  # a failure of a reader is raised as itself
            worker.terminate()
            await death
            return num_deaths
        assert death.result() == 139
        num_deaths += 1
        await reap_workers_with_prefix(world.connections.commands, world.keys, name)


async def read_to_error(world: World) -> tuple[list[int], ErrorEvent]:
    tokens: list[int] = []
    async for event in InboxReader(await world.client.submission.submit(poison())):
        if isinstance(event, TokenEvent):
            assert event.index == len(tokens)
            tokens += event.token_ids
        else:
            assert isinstance(event, ErrorEvent)
            return tokens, event
    raise AssertionError("no terminal event")


def poison() -> GenerationRequest:
    return make_request([5, 6, POISON], "poison", max_tokens=80, ignore_eos=True)


@pytest.mark.parametrize(("num_tokens", "deaths"), [(0, 3), (50, 4)])
async def test_poisonous_request_costs_its_neighbors_nothing(
    start_world: StartWorld, num_tokens: int, deaths: int
) -> None:
    """Poison in the prefill: two crashes, then it runs alone. A crash after new tokens does not count."""
    world = await start_world()
    readers = world.read(3, max_tokens=400)
    poisoned = asyncio.create_task(read_to_error(world))
    done = asyncio.gather(poisoned, *(reader.finished for reader in readers))
    flags = ["--script-poison-after", str(num_tokens), "--script-step-seconds", "0.005"]
    assert await outlive(world, *flags, until=done) == deaths
    tokens, error = poisoned.result()
    assert error.code == "request_failed"
    assert tokens == expected_output(poison(), max_num_tokens=2048)[:num_tokens]
    await world.all_complete(readers)
    await world.nothing_is_left()
    (letter,) = await DeadLetters(world.connections.commands, world.keys).list()
    assert (letter.request_id, letter.attempts) == ("poison", deaths)
