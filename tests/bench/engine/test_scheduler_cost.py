"""Run the scheduler cost benchmark."""

from bench.engine.scheduler_cost import admission_microseconds, hashing_nanoseconds, step_microseconds


def test_every_case_runs_and_takes_time() -> None:
    """Run every case once; its duration is not compared with a limit."""
    assert step_microseconds(4, repeats=1, enable_prefix_caching=False)["least"] > 0
    assert step_microseconds(4, repeats=1, one_ahead=True)["least"] > 0
    assert hashing_nanoseconds(repeats=1, num_tokens=160)["least"] > 0
    assert set(admission_microseconds(128, repeats=1)) == {"miss", "hit"}
