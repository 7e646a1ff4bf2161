"""Readers of long bodies take turns: few per iteration of the event loop, in their order."""

import asyncio

from gateway.http.read_turns import READS_PER_ITERATION, ReadTurns


async def test_few_readers_have_a_turn_per_iteration_in_their_order() -> None:
    turns, order = ReadTurns(), list[int]()

    async def read(number: int) -> None:
        await turns.wait()
        order.append(number)

    readers = [asyncio.create_task(read(number)) for number in range(3 * READS_PER_ITERATION)]
    largest = 0
    while len(order) < len(readers):
        before = len(order)
        await asyncio.sleep(0)
        largest = max(largest, len(order) - before)
    assert order == list(range(len(readers)))
    assert largest == READS_PER_ITERATION


async def test_canceled_reader_takes_no_turn_and_others_go_on() -> None:
    turns = ReadTurns()
    readers = [asyncio.create_task(turns.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    readers[1].cancel()
    assert await asyncio.gather(*readers[::2]) == [None, None]
    await asyncio.wait_for(turns.wait(), 5)  # after all have gone
