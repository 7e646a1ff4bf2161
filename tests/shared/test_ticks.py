"""Ticks: pauses of different tasks end together, and none ends twice at one tick."""

import pytest

from shared.ticks import next_tick, seconds_until_tick


@pytest.mark.parametrize("now", [7.0, 7.01, 7.25, 7.5, 7.89])
def test_tick_pauses_end_at_one_moment(now: float) -> None:
    assert now + seconds_until_tick(now, 1.0) == pytest.approx(8.0)  # rounding of binary fractions


def test_tick_shorter_periods_align_with_longer() -> None:
    assert 7.6 + seconds_until_tick(7.6, 0.5) == pytest.approx(8.0)  # as above


@pytest.mark.parametrize("early", [0.0999, 1e-9])
def test_tick_early_timer_does_not_fire_twice(early: float) -> None:
    assert seconds_until_tick(8.0 - early, 1.0) == pytest.approx(1.0 + early)  # as above


async def test_next_tick_returns() -> None:
    await next_tick(0.001)
