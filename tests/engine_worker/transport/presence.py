"""A presence that a test sets."""

from dataclasses import dataclass


@dataclass
class FixedPresence:
    """By default the observer, for whom no beat is old enough."""

    is_observer: bool = True
    is_steady: bool = True
    fleet_seconds: float = 0.0
    dead_after_seconds: float = 15.0
