"""Tasks that begin at any time end their pauses together, and none twice at one tick."""

import pytest

from shared.ticks import next_tick, seconds_until_tick


@pytest.mark.parametrize("now", [7.0, 7.01, 7.25, 7.5, 7.89])
def test_pauses_end_at_one_moment(now: float) -> None:
    assert now + seconds_until_tick(now, 1.0) == pytest.approx(8.0)  # sums of binary fractions


def test_shorter_ticks_fall_on_longer_ones() -> None:
    assert 7.6 + seconds_until_tick(7.6, 0.5) == pytest.approx(8.0)  # as above


@pytest.mark.parametrize("early", [0.0999, 1e-9])
def test_a_timer_that_ends_early_does_not_end_twice(early: float) -> None:
    assert seconds_until_tick(8.0 - early, 1.0) == pytest.approx(1.0 + early)  # as above


async def test_it_returns() -> None:
    await next_tick(0.001)
