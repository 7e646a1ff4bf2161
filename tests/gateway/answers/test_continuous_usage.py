"""Sequence ends are joined with the preceding tokens.

Each update and each failure is delivered once, even if a reader stops early.
"""

import json
from collections.abc import Callable, Iterator

import pytest

from gateway.apis.completions.schema import parse_completion
from gateway.errors import GatewayError, GenerationFailed
from gateway.http.json_body import decode_body
from gateway.pipeline.choice_progress import ChoiceUpdate
from gateway.pipeline.continuous_usage import ContinuousUsage
from gateway.pipeline.response_format import UsageCount
from shared.messages import FinishReason

Ready = Callable[[], Iterator[list[ChoiceUpdate]]]


class Counted:
    usage = UsageCount(prompt_tokens=3)

    def __init__(self, ended: set[int]) -> None:
        self._ended = ended

    def has_all_tokens(self, index: int) -> bool:
        return index in self._ended


def usage_of(*ended: int) -> ContinuousUsage:
    body = {"prompt": "hi", "stream": True, "n": 2}
    return ContinuousUsage(parse_completion(decode_body(json.dumps(body).encode())), Counted(set(ended)))


def token(index: int, text: str) -> ChoiceUpdate:
    return ChoiceUpdate(index, text, None, token_ids=(1,))


def end(index: int, *token_ids: int) -> ChoiceUpdate:
    return ChoiceUpdate(index, "", FinishReason.LENGTH, token_ids=token_ids)


def source(*batches: list[ChoiceUpdate], error: GatewayError | None = None) -> Ready:
    """Yield each batch once, as a generation does."""
    left = list(batches)

    def ready() -> Iterator[list[ChoiceUpdate]]:
        nonlocal error
        while left:
            yield left.pop(0)
        if error is not None:
            raised, error = error, None
            raise raised

    return ready


def read_with_interruptions(usage: ContinuousUsage, ready: Ready, num_read: int) -> list[tuple[int, str, bool]]:
    """Read `num_read` batches at a time, close the reader, and continue with a new one until nothing is left."""
    delivered = []
    while True:
        turn = usage.with_ends(ready())
        updates = [updates for _, updates in zip(range(num_read), turn, strict=False)]
        turn.close()  # type: ignore[attr-defined]
        delivered += [(update.index, update.text, update.reason is not None) for some in updates for update in some]
        if not updates:
            return delivered


BATCHES = ([token(0, "a"), token(1, "x")], [token(0, "b")], [end(1)], [token(0, "c")], [end(0)])


@pytest.mark.parametrize("num_read", [1, 2, 99])
def test_updates_are_delivered_once_and_end_with_their_tokens(num_read: int) -> None:
    delivered = read_with_interruptions(usage_of(0, 1), source(*BATCHES), num_read)
    assert [entry for entry in delivered if entry[0] == 0] == [(0, "a", False), (0, "b", False), (0, "c", True)]
    assert [entry for entry in delivered if entry[0] == 1] == [(1, "x", True)]


def test_token_that_may_be_the_last_waits_for_its_end() -> None:
    usage = usage_of(1)
    assert read_with_interruptions(usage, source([token(0, "a"), token(1, "x")]), 99) == [(0, "a", False)]
    assert read_with_interruptions(usage, source([end(1)], [end(0)]), 99) == [(1, "x", True), (0, "", True)]
    assert read_with_interruptions(usage_of(0), source([token(0, "a")], [end(0, 2)]), 99) == [
        (0, "a", False),
        (0, "", True),
    ]


@pytest.mark.parametrize("num_read", [1, 2])
def test_failure_is_raised_after_waiting_updates_and_again(num_read: int) -> None:
    usage, error = usage_of(0, 1), GenerationFailed("It broke.")
    ready = source([token(0, "a"), token(1, "x")], error=error)
    first = next(usage.with_ends(ready()))
    assert [update.text for update in first] == ["a", "x"]
    for _ in range(num_read):
        with pytest.raises(GenerationFailed):
            list(usage.with_ends(ready()))
