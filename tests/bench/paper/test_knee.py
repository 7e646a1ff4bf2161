"""Find the request rate at which latency doubles."""

from collections.abc import Callable

import pytest

from bench.paper.knee import rising_rates, summary, sustained_rate, sweep


def queue(capacity: float) -> Callable[[float], float]:
    """Return the mean time in an M/M/1 system of `capacity` requests/s, as a multiple of the time without load."""
    return lambda rate: 1.0 / (1.0 - rate / capacity) if rate < capacity else 1e6


def test_rate_between_points_is_interpolated() -> None:
    assert sustained_rate([(1.0, 1.0), (4.0, 4.0)], unloaded_seconds=1.0) == pytest.approx(2.0)
    assert sustained_rate([(1.0, 1.0), (3.0, 1.5)], unloaded_seconds=1.0) == 3.0
    assert sustained_rate([(1.0, 2.5), (3.0, 9.0)], unloaded_seconds=1.0) == 0.0


def test_sweep_finds_where_latency_doubles() -> None:
    """An M/M/1 queue has twice the latency at half its capacity, and five times at 0.8 of it."""
    curves = {
        name: sweep(rising_rates(0.1, 50.0), queue(capacity), 1.0) for name, capacity in (("a", 10.0), ("b", 4.0))
    }
    figures = summary(curves, 1.0, reference="a")
    assert figures["knee_requests_per_second"]["a"] == pytest.approx(5.0, rel=0.01)
    assert figures["saturation_requests_per_second"]["b"] == pytest.approx(3.2, rel=0.01)
    assert figures["a_over_at_knee"] == {"b": pytest.approx(2.5, rel=0.02)}
    assert curves["b"] == sorted(curves["b"])
    assert curves["b"][-1][0] < 6.0, "it stops once the load is too much"
