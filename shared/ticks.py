"""Ticks that all tasks of a process share, so that an idle process wakes once for all of them.

await next_tick(1.0)
"""

import asyncio

_MIN_TICK_RATIO = 0.1  # a timer may end slightly early, and must not end twice


async def next_tick(seconds: float) -> None:
    """Return at the next multiple of `seconds` on the event loop's clock, which all tasks of a process share."""
    await asyncio.sleep(until_tick(seconds))


def until_tick(seconds: float) -> float:
    """Return the seconds that next_tick() would wait now, for callers that also wait for something else."""
    return seconds_until_tick(asyncio.get_running_loop().time(), seconds)


def seconds_until_tick(now: float, seconds: float) -> float:
    """Return the time from `now` to the next multiple of `seconds`, or to the one after if that is very near."""
    left = seconds - now % seconds
    return left if left >= _MIN_TICK_RATIO * seconds else left + seconds
