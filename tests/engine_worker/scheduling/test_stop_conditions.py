"""Conditions that complete an output."""

from typing import Any

import pytest

from engine_worker.kv.sequence import finish_reason
from shared.messages import FinishReason
from tests.builders import EOS_TOKEN_ID, make_sequence

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("output", "sampling", "expected"),
    [
        ([], {"max_tokens": 3}, None),
        ([7, 8], {"max_tokens": 3}, None),
        ([7, 8, 9], {"max_tokens": 3}, LENGTH),
        ([7, 8, 9, 10], {"max_tokens": 3}, LENGTH),  # a journal of an owner that died before it reported the end
        ([7, EOS_TOKEN_ID], {}, STOP),
        ([EOS_TOKEN_ID, 7], {}, None),  # only the last token counts
        ([7, EOS_TOKEN_ID], {"ignore_eos": True}, None),
        ([7, 50], {"stop_token_ids": (40, 50)}, STOP),
        ([7, 50], {"stop_token_ids": (40, 50), "ignore_eos": True}, STOP),
        ([7, EOS_TOKEN_ID], {"min_tokens": 3}, None),
        ([7, 8, 9, EOS_TOKEN_ID], {"min_tokens": 3}, STOP),
        ([7, 8, EOS_TOKEN_ID], {"max_tokens": 3}, STOP),  # both conditions: the model had finished
    ],
)
def test_finish_reason_follows_output(
    output: list[int], sampling: dict[str, Any], expected: FinishReason | None
) -> None:
    sequence = make_sequence(5, output_token_ids=output, **sampling)
    assert finish_reason(sequence, max_num_tokens=100) is expected


@pytest.mark.parametrize(("num_output", "expected"), [(4, None), (5, LENGTH)])
def test_finish_reason_total_length_is_limited(num_output: int, expected: FinishReason | None) -> None:
    sequence = make_sequence(5, output_token_ids=[7] * num_output, max_tokens=50)
    assert finish_reason(sequence, max_num_tokens=10) is expected
