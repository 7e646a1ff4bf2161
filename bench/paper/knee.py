"""Latency against load, and the highest load that a system sustains."""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

KNEE_FACTOR = 2.0  # times the unloaded latency
SATURATION_FACTOR = 5.0  # the queue grows: additional load only waits
_NUM_HALVINGS = 3

Curve = list[tuple[float, float]]  # (requests/s, normalized latency in seconds/token), ascending rates


def sweep(rates: Iterable[float], latency_seconds: Callable[[float], float], unloaded_seconds: float) -> Curve:
    """Return the latency at each rate until saturation, with finer steps around the knee and the saturation."""
    curve: Curve = []
    for rate in rates:
        curve.append((rate, latency_seconds(rate)))
        if curve[-1][1] > SATURATION_FACTOR * unloaded_seconds:
            break
    for factor in (KNEE_FACTOR, SATURATION_FACTOR):
        for _ in range(_NUM_HALVINGS):
            limit = factor * unloaded_seconds
            bracket = [pair for pair in pairwise(curve) if pair[0][1] < limit <= pair[1][1]]
            if bracket:
                middle = math.sqrt(bracket[0][0][0] * bracket[0][1][0])
                curve = sorted([*curve, (middle, latency_seconds(middle))])
    return curve


def sustained_rate(curve: Curve, unloaded_seconds: float, factor: float = KNEE_FACTOR) -> float:
    """Return the rate at which the latency is `factor` times the unloaded one, interpolated geometrically.

    It is the last rate for a curve that never reaches that latency, and 0 for one that starts above it.
    """
    limit = factor * unloaded_seconds
    if curve[0][1] >= limit:
        return 0.0
    for (rate, latency), (next_rate, next_latency) in pairwise(curve):
        if next_latency >= limit:
            share = math.log(limit / latency) / math.log(next_latency / latency)
            return rate * (next_rate / rate) ** share
    return curve[-1][0]


def rising_rates(first: float, last: float, step: float = 1.5) -> list[float]:
    """Return a geometric sequence from `first` to about `last`."""
    count = round(math.log(last / first) / math.log(step)) + 1
    return [first * step**index for index in range(count)]


def summary(curves: dict[str, Curve], unloaded_seconds: float, reference: str) -> dict[str, dict[str, float]]:
    """Return the sustained rates of all curves, and the `reference` rate over each of them."""
    figures: dict[str, dict[str, float]] = {}
    for name, factor in (("knee", KNEE_FACTOR), ("saturation", SATURATION_FACTOR)):
        rates = {policy: sustained_rate(curve, unloaded_seconds, factor) for policy, curve in curves.items()}
        figures[f"{name}_requests_per_second"] = {policy: round(rate, 3) for policy, rate in rates.items()}
        figures[f"{reference}_over_at_{name}"] = {
            policy: round(rates[reference] / rate, 2) for policy, rate in rates.items() if policy != reference and rate
        }
    return figures
