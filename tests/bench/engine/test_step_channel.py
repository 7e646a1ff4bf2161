"""Run the step channel benchmark."""

from bench.engine.step_channel import case, decode_of


def test_case_reports_each_part() -> None:
    """Run every case once; its duration is not compared with a limit."""
    found = case(size=3, step=decode_of(4, context_tokens=8192, num_groups=2), num_rounds=2, round_sends=5)
    assert (found["ranks"], found["sequences"], found["table_bytes"]) == (3, 4, 4 * 2 * 8192 // 16 * 4)
    assert (
        min(found[f"{part}_microseconds"][clock] for part in ("encode", "send", "wake") for clock in ("clock", "cpu"))
        > 0
    )
