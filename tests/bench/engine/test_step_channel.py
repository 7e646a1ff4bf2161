from bench.engine.step_channel import case


def test_a_case_tells_of_each_part() -> None:
    """How much is for a quiet machine; here a case must only work."""
    found = case(size=3, num_sequences=4, num_rounds=2, round_sends=5)
    assert (found["ranks"], found["sequences"]) == (3, 4)
    assert (
        min(found[f"{part}_microseconds"][clock] for part in ("encode", "send", "wake") for clock in ("clock", "cpu"))
        > 0
    )
