"""bench/engine/profile.py: which part of a span the device was busy, and what it waited for."""

from bench.engine.profile import busy_and_gaps


def test_a_gap_is_time_in_which_nothing_runs() -> None:
    spans = [(10.0, 5.0, "a"), (12.0, 1.0, "in a"), (14.0, 3.0, "past a"), (20.0, 2.0, "b"), (22.0, 1.0, "c")]
    assert busy_and_gaps(spans) == (13.0, 10.0, [(3.0, "b")])
