"""Products of request fields are bounded before anything is queued, and errors name the fields."""

import json
from typing import Any

import pytest

from gateway.apis.chat.schema import parse_chat
from gateway.apis.completions.schema import parse_completion
from gateway.errors import InvalidRequest
from gateway.http.json_body import decode_body
from gateway.pipeline.plan import MAX_RULE_BYTES, MAX_VALUES, plan_requests
from gateway.pipeline.request import CompletionRequest
from gateway.text.served_model import ModelLimits
from shared.messages import (
    MAX_JOURNAL_BYTES,
    GenerationRequest,
    JournalExtras,
    JournalFrame,
    PromptLogprobs,
    TokenLogprobs,
    encode,
    encoded_logprobs,
)

LIMITS = ModelLimits(max_model_len=2**20, vocab_size=2**31)


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(decode_body(json.dumps({"prompt": [1], **fields}).encode()))


def chat(**fields: Any) -> CompletionRequest:
    return parse_chat(decode_body(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()))


def planned(request: CompletionRequest, prompt_tokens: int = 1, num_prompts: int = 1) -> list[GenerationRequest]:
    return plan_requests(request, [[1] * prompt_tokens] * num_prompts, LIMITS)


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "num_prompts", "param", "allowed"),
    [
        (completion(max_tokens=MAX_VALUES + 1), 1, 1, "max_tokens", "at most 524288 tokens"),
        (completion(max_tokens=100_000, n=8), 1, 1, "max_tokens", "at most 65536 tokens"),
        (completion(max_tokens=40_000, logprobs=20), 1, 1, "max_tokens", "at most 23831 tokens"),
        (completion(max_tokens=10_000, n=8, logprobs=20), 1, 1, "max_tokens", "at most 2978 tokens"),
        (completion(max_tokens=100_000, n=1, best_of=8), 1, 1, "max_tokens", "at most 32768 tokens"),
        (
            completion(max_tokens=5000, logprobs=0, logprob_token_ids=list(range(128))),
            1, 1, "max_tokens", "at most 4032 tokens",
        ),
        (completion(prompt=[[1]] * 32, max_tokens=20_000), 1, 32, "max_tokens", "at most 16384 tokens"),
        (completion(prompt=[[1]] * 32, prompt_logprobs=20), 8191, 32, "prompt_logprobs", "at most 524288"),
        (completion(prompt=[[1]] * 32, echo=True, logprobs=20, max_tokens=0), 8191, 32, "prompt", "at most 524288"),
        (completion(n=8, prompt_logprobs=20), 8191, 1, "prompt_logprobs", "an answer has at most 524288"),
        (completion(n=8, echo=True), 100_000, 1, "prompt", "an answer has at most 524288"),
        (completion(n=8, return_token_ids=True), 100_000, 1, "prompt", "an answer has at most 524288"),
        (chat(max_completion_tokens=100_000, n=8), 1, 1, "max_completion_tokens", "at most 65536 tokens"),
        (chat(prompt_logprobs=20), 40_000, 1, "prompt_logprobs", "an answer has at most 524288"),
    ],
)  # fmt: skip
def test_product_above_its_limit_names_fields_and_limit(
    request_: CompletionRequest, prompt_tokens: int, num_prompts: int, param: str, allowed: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        planned(request_, prompt_tokens, num_prompts)
    assert refused.value.param == param and allowed in refused.value.message


LONG_SCHEMA = {"guided_json": {"type": "integer", "description": "x" * 500_000}}
MANY_IDS = {"allowed_token_ids": list(range(100_000))}


@pytest.mark.parametrize(("rules", "max_prompts"), [(LONG_SCHEMA, 8), (MANY_IDS, 8)])
def test_data_stored_per_prompt_is_bounded_in_total(rules: dict[str, Any], max_prompts: int) -> None:
    """A body holds such data once, but 32 prompts would turn 2 MB into 64 MB for the event loop and the store."""
    for num_prompts in (1, max_prompts):
        requests = planned(completion(prompt=[[1]] * num_prompts, max_tokens=1, **rules), 1, num_prompts)
        assert sum(len(encode(request)) for request in requests) <= MAX_RULE_BYTES + 10_000
    with pytest.raises(InvalidRequest, match=f"at most {max_prompts} such prompts") as refused:
        planned(completion(prompt=[[1]] * (max_prompts + 1), max_tokens=1, **rules), 1, max_prompts + 1)
    assert refused.value.param == "prompt"


def test_single_prompt_may_fill_the_body() -> None:
    rules = {"guided_json": {"type": "integer", "description": "x" * 1_900_000}}
    (request,) = planned(completion(max_tokens=1, **rules))
    assert request.sampling.grammar is not None


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "num_prompts"),
    [
        (completion(max_tokens=MAX_VALUES), 1, 1),
        (completion(max_tokens=65_536, n=8), 1, 1),
        (completion(max_tokens=23_831, logprobs=20), 1, 1),
        # harnesses score texts like this
        (completion(prompt=[[1]] * 32, echo=True, logprobs=1, max_tokens=0), 4096, 32),
        (completion(prompt_logprobs=20, max_tokens=1), 16_384, 1),
        (completion(prompt=[[1]] * 8, n=8, max_tokens=8192), 100_000, 8),  # prompts without logprobs
        (chat(n=8, max_tokens=16_384), 100_000, 1),
    ],
)
def test_usual_requests_are_accepted(request_: CompletionRequest, prompt_tokens: int, num_prompts: int) -> None:
    for plan in planned(request_, prompt_tokens, num_prompts):
        assert plan.sampling.max_tokens == max(1, request_.max_tokens or 0)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (chat(), MAX_VALUES),
        (chat(n=8), 65_536),
        (chat(logprobs=True, top_logprobs=20), 23_831),
        (chat(prompt_logprobs=0), (MAX_VALUES - 2)),
    ],
)
def test_answer_without_limit_uses_the_allowed_length(request_: CompletionRequest, expected: int) -> None:
    (plan,) = planned(request_)
    assert plan.sampling.max_tokens == expected


@pytest.mark.parametrize("num_scores", [None, 0, 20, 128])
def test_longest_journal_of_an_accepted_request_is_readable(num_scores: int | None) -> None:
    """Use the longest tokens, each in its own frame, as an engine step writes them."""
    worst = encoded_logprobs(TokenLogprobs(-1.1, (2**31 - 1,) * (num_scores or 0), (-1.1,) * (num_scores or 0)))
    tokens = JournalFrame(2**20, [2**31 - 1], None if num_scores is None else JournalExtras([worst]), 63)
    values = 1 if num_scores is None else 2 + num_scores
    assert len(encode(tokens)) * (MAX_VALUES // values) < MAX_JOURNAL_BYTES / 2
    if num_scores is not None:
        prompt = JournalFrame(0, [], JournalExtras(prompt_logprobs=PromptLogprobs(2**20, [worst])))
        assert len(encode(prompt)) * (MAX_VALUES // values) < MAX_JOURNAL_BYTES / 2
