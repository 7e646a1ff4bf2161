"""Requests that the engine refuses: error codes and messages."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from engine_worker.kv.span import KVSpans
from engine_worker.scheduling.request_checks import RequestLimits, RequestRefused, check_request
from shared.messages import ErrorCode, StoredChoice
from tests.builders import make_request

LIMITS = RequestLimits(
    vocab_size=100, max_model_len=32, capacity_blocks=6, spans=KVSpans.of((0,), 4), max_beam_width=64
)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": nan}, "temperature is nan"),
        ({"temperature": inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": inf}, "repetition_penalty is inf"),
        ({"presence_penalty": nan}, "presence_penalty is nan"),
        ({"frequency_penalty": -inf}, "frequency_penalty is -inf"),
        ({"logit_bias": {1: nan}}, "logit_bias"),
        ({"logit_bias": {100: 1.0}}, "logit_bias holds 100"),
        ({"stop_token_ids": (5, -1)}, "stop_token_ids holds -1"),
        ({"n": 0}, "n is 0"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width is 2; it must be at least n, 3"),
        ({"use_beam_search": True, "beam_width": 51}, "only 100 tokens"),
        ({"use_beam_search": True, "beam_width": 65}, "beam_width is 65; this worker computes at most 64 beams"),
        ({"use_beam_search": True, "beam_width": 2, "temperature": 1.0}, "must be 0 with beam search"),
        ({"use_beam_search": True, "beam_width": 2, "length_penalty": nan}, "length_penalty is nan"),
    ],
)
def test_request_check_bad_sampling_parameter_is_named(sampling: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestRefused, match=named) as refusal:
        check_request(make_request([1, 2], **sampling), [], LIMITS)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("prompt", "resumed", "code", "named"),
    [
        ([], [], ErrorCode.INVALID_REQUEST, "empty"),
        ([1, 100], [], ErrorCode.INVALID_REQUEST, "prompt_token_ids holds 100; token ids of this model are 0..99"),
        ([1, -1], [], ErrorCode.INVALID_REQUEST, "prompt_token_ids holds -1"),
        ([1], [3, 100], ErrorCode.INVALID_REQUEST, "resumed_token_ids holds 100"),
        ([1] * 32, [], ErrorCode.INVALID_REQUEST, "32 tokens"),
        ([1] * 24, [], ErrorCode.CAPACITY_EXCEEDED, "need 7 KV blocks of 4 tokens; this worker has 6"),
    ],
)
def test_request_check_bad_prompt_is_refused(
    prompt: list[int], resumed: list[int], code: ErrorCode, named: str
) -> None:
    with pytest.raises(RequestRefused, match=named) as refusal:
        check_request(make_request(prompt), [StoredChoice(resumed)], LIMITS)
    assert refusal.value.code is code


@pytest.mark.parametrize(
    ("num_prompt", "sampling", "named"),
    [
        # 6 blocks of 4, 2 of them shared: 4 beams can have one of their own, 5 cannot
        (8, {"beam_width": 5}, "one token of each of 5 sequences need 7 KV blocks of 4 tokens; this worker has 6"),
        (11, {"beam_width": 5}, "need 7 KV blocks"),
        (15, {"beam_width": 4}, "need 7 KV blocks"),
    ],
)
def test_request_check_beams_exceeding_capacity_are_refused(
    num_prompt: int, sampling: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestRefused, match=named) as refusal:
        check_request(make_request(num_prompt, use_beam_search=True, **sampling), [], replace(LIMITS, vocab_size=1000))
    assert refusal.value.code is ErrorCode.CAPACITY_EXCEEDED


@pytest.mark.parametrize(
    "request_",
    [
        make_request([0, 99], temperature=0.0),
        make_request([1] * 11, n=4),
        make_request([1] * 4, n=64, max_tokens=10_000),  # each sequence fits alone
        make_request([1], use_beam_search=True, beam_width=6, n=2, length_penalty=-2.0, early_stopping="never"),
        make_request([1] * 23, max_tokens=10_000),  # ends at the context length, which is valid
        make_request([1], temperature=2.0, top_k=5, top_p=1.0, min_p=1.0, repetition_penalty=1.3),
        make_request([1], min_tokens=8, max_tokens=8, presence_penalty=-2.0, logit_bias={99: -100.0}),
    ],
)
def test_request_check_valid_requests_pass(request_: Any) -> None:
    check_request(request_, [StoredChoice([5, 6])], LIMITS)
