"""The share of the store that one key may hold, and the bytes that a request reserves."""

from typing import Any

import pytest

from gateway.store.acceptance import reserved_bytes, share_of
from shared.messages import (
    GenerationRequest,
    JournalExtras,
    JournalFrame,
    SamplingParams,
    TokenLogprobs,
    encode,
    encoded_logprobs,
)
from shared.new_requests import Share


@pytest.mark.parametrize(
    ("ratio", "store_bytes", "num_models", "share"),
    [
        (0.5, 1000, 1, Share("k", 500)),
        (0.5, 1000, 2, Share("k", 250)),
        (1.0, 1000, 1, Share("k")),
        (0.5, 0, 1, Share("k")),
    ],
)
def test_limited_store_is_divided_among_models(ratio: float, store_bytes: int, num_models: int, share: Share) -> None:
    assert share_of("k", ratio, store_bytes, num_models) == share


@pytest.mark.parametrize("num_logprobs", [None, 0, 5, 20])
def test_reserved_bytes_hold_the_journal(num_logprobs: int | None) -> None:
    """Write frame by frame, as a step does, with the longest token ids and indexes of real models."""
    sampling = SamplingParams(max_tokens=1000, seed=0, n=2, logprobs=num_logprobs)
    request = GenerationRequest(request_id="a", prompt_token_ids=[1], sampling=sampling)
    scores = None if num_logprobs is None else TokenLogprobs(-1.25, (60_000,) * num_logprobs, (-1.25,) * num_logprobs)
    frame = JournalFrame(999, [60_000], JournalExtras([encoded_logprobs(scores)]) if scores else None, 1)
    assert 2000 * len(encode(frame)) <= reserved_bytes(request) < 3000 * len(encode(frame))


def test_first_plain_tokens_and_all_logprobs_are_reserved() -> None:
    def of(**sampling: Any) -> int:
        params = SamplingParams(seed=0, **sampling)
        return reserved_bytes(GenerationRequest(request_id="a", prompt_token_ids=[1] * 10, sampling=params))

    assert of(max_tokens=100_000) == of(max_tokens=1024) > of(max_tokens=1000)
    assert of(max_tokens=100_000, logprobs=5) == 100 * of(max_tokens=1000, logprobs=5)
    assert of(max_tokens=1, prompt_logprobs=20) - of(max_tokens=1) > 10 * 20 * 12
