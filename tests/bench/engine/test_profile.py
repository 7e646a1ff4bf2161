"""Split a traced span into the time in which the device was busy and the causes of its gaps."""

from bench.engine.profile import busy_and_gaps


def test_gap_is_time_without_a_running_kernel() -> None:
    spans = [(10.0, 5.0, "a"), (12.0, 1.0, "in a"), (14.0, 3.0, "past a"), (20.0, 2.0, "b"), (22.0, 1.0, "c")]
    assert busy_and_gaps(spans) == (13.0, 10.0, [(3.0, "b")])
