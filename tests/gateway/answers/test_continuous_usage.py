"""Sequence ends are joined with the preceding tokens; each delta is passed on once."""

import pytest

from gateway.pipeline.choice_writer import ChoiceDelta, Stage
from gateway.pipeline.continuous_usage import EndJoiner
from gateway.pipeline.response_format import UsageCount
from shared.messages import FinishReason


class Counted:
    usage = UsageCount(prompt_tokens=3)

    def __init__(self, ended: set[int]) -> None:
        self._ended = ended

    def has_all_tokens(self, index: int) -> bool:
        return index in self._ended


class Delivered(Stage):
    """(index, text, whether it is the end) of each delta."""

    def __init__(self) -> None:
        self.deltas: list[tuple[int, str, bool]] = []

    def write(self, delta: ChoiceDelta, out: bytearray) -> None:
        self.deltas.append((delta.index, delta.text, delta.reason is not None))

    def of(self, index: int) -> list[tuple[int, str, bool]]:
        return [delta for delta in self.deltas if delta[0] == index]


def joiner(*ended: int) -> tuple[EndJoiner, Delivered]:
    """Return a joiner and what it delivers. The choices `ended` have all their tokens."""
    delivered = Delivered()
    return EndJoiner(Counted(set(ended)), delivered), delivered


def token(index: int, text: str) -> ChoiceDelta:
    return ChoiceDelta(index, text, None, token_ids=(1,))


def end(index: int, *token_ids: int) -> ChoiceDelta:
    return ChoiceDelta(index, "", FinishReason.LENGTH, token_ids=token_ids)


DELTAS = (token(0, "a"), token(1, "x"), token(0, "b"), end(1), token(0, "c"), end(0))


@pytest.mark.parametrize("flush_after", [1, 2, 99])
def test_deltas_are_passed_on_once_and_end_with_their_tokens(flush_after: int) -> None:
    ends, delivered = joiner(0, 1)
    for number, delta in enumerate(DELTAS, 1):
        ends.write(delta, bytearray())
        if number % flush_after == 0:
            ends.flush(bytearray())
    ends.flush(bytearray())
    assert delivered.of(0) == [(0, "a", False), (0, "b", False), (0, "c", True)]
    assert delivered.of(1) == [(1, "x", True)]


def test_token_that_may_be_the_last_waits_for_its_end() -> None:
    ends, delivered = joiner(1)
    for delta in (token(0, "a"), token(1, "x")):
        ends.write(delta, bytearray())
    ends.flush(bytearray())
    assert delivered.deltas == [(0, "a", False)]
    for delta in (end(1), end(0)):
        ends.write(delta, bytearray())
    assert delivered.deltas[1:] == [(1, "x", True), (0, "", True)]


def test_end_with_a_token_is_not_joined() -> None:
    ends, delivered = joiner(0)
    for delta in (token(0, "a"), end(0, 2)):
        ends.write(delta, bytearray())
    assert delivered.deltas == [(0, "a", False), (0, "", True)]


def test_last_flush_passes_on_what_waits() -> None:
    ends, delivered = joiner(0, 1)
    for delta in (token(0, "a"), token(1, "x")):
        ends.write(delta, bytearray())
    ends.flush(bytearray(), is_last=True)
    ends.flush(bytearray(), is_last=True)
    assert delivered.deltas == [(0, "a", False), (1, "x", False)]
