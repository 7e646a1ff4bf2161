"""Ticks that the tasks of a process have together, so that an idle process wakes once for all of them.

    await next_tick(1.0)

It stands beside every walk, under the tasks that look at something again and again. It knows nobody's work.
"""

import asyncio

_LEAST_OF_A_TICK = 0.1  # a timer may end a little before its time, and must not end twice


async def next_tick(seconds: float) -> None:
    """Return at the next multiple of `seconds` on the event loop's clock, which all tasks of a process share."""
    await asyncio.sleep(until_tick(seconds))


def until_tick(seconds: float) -> float:
    """Return how long next_tick() would wait now: for who waits for something else besides."""
    return seconds_until_tick(asyncio.get_running_loop().time(), seconds)


def seconds_until_tick(now: float, seconds: float) -> float:
    """Return how long it is from `now` to the next multiple of `seconds`, or to the one after where that is near."""
    left = seconds - now % seconds
    return left if left >= _LEAST_OF_A_TICK * seconds else left + seconds
