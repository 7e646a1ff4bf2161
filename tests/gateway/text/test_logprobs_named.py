"""The chosen token comes first among named ones."""

import pytest

from gateway.text.logprobs import with_own_first
from shared.messages import TokenLogprobs, decoded_logprobs, encoded_logprobs


@pytest.mark.parametrize(
    ("chosen", "named", "expected"),
    [(42, (5000,), (42, 5000)), (8, (5, 8, 9), (8, 5, 9)), (7, (), (7,))],
)
def test_chosen_token_comes_first(chosen: int, named: tuple[int, ...], expected: tuple[int, ...]) -> None:
    of_named = tuple(-2.0 if token_id != chosen else -1.0 for token_id in named)
    (found,) = decoded_logprobs([with_own_first(chosen, encoded_logprobs(TokenLogprobs(-1.0, named, of_named)))])
    assert found == TokenLogprobs(-1.0, expected, (-1.0, *[-2.0] * (len(expected) - 1)))
