"""Quantiles, and the summary of a list of values."""

import math

QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


def quantile(ordered: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def distribution(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    figures = {name: quantile(ordered, share) for name, share in QUANTILES.items()}
    return {"mean": sum(ordered) / len(ordered), **figures, "max": ordered[-1]}
