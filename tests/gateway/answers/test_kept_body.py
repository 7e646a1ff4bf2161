"""A stored answer keeps only the request fields that are needed to write the answer again."""

import json
import random
import string
import zlib
from typing import Any

import msgspec
import pytest

from gateway.apis.anthropic.kinds import MESSAGE
from gateway.apis.chat.kinds import CHAT
from gateway.apis.completions.kinds import COMPLETION
from gateway.apis.responses.kinds import RESPONSE
from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.retention import (
    MAX_UNPACKED_BYTES,
    AnswerRecord,
    Retention,
    decode_record,
    kept_body,
    new_terms,
    packed,
    unpacked,
)
from shared.messages import GenerationRequest, SamplingParams

MEGABYTES = "A" * 2_000_000
NOISE = "".join(random.Random(1).choices(string.printable, k=100_000))  # incompressible
TOOL = {"name": "f", "description": NOISE[:100], "parameters": {"type": "object"}}
HI = [{"role": "user", "content": NOISE}]
BODIES: list[tuple[AnswerKind, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "n": 2, "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": TOOL}], "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object"}, "return_token_ids": True}),
    (
        CHAT,
        {
            "messages": [*HI, {"role": "assistant", "content": "<"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    (COMPLETION, {"prompt": NOISE, "max_tokens": 5, "best_of": 3, "n": 2, "bad_words": ["x"] * 500}),
    (COMPLETION, {"prompt": [NOISE, NOISE], "logprobs": 2, "logit_bias": {"1": 5}}),
    (COMPLETION, {"prompt": list(range(9999)), "allowed_token_ids": list(range(9999)), "cache_salt": "s"}),
    (COMPLETION, {"prompt": [[1, 2], [3]], "detach_seconds": 5}),
    (MESSAGE, {"model": "m", "messages": HI, "system": NOISE, "max_tokens": 5, "thinking": {"type": "adaptive"}}),
    (
        MESSAGE,
        {
            "model": "m",
            "messages": [*HI, {"role": "assistant", "content": "{"}],
            "max_tokens": 5,
            "stop_sequences": ["}"],
        },
    ),
    (RESPONSE, {"input": NOISE, "store": False, "detach_seconds": 1}),
]
EXTRAS = {"user": MEGABYTES, "metadata": {"a": "b"}, "x_new": MEGABYTES, "no name": 1, **{f"f{i}": i for i in range(9)}}


def kept(kind: AnswerKind, body: dict[str, Any]) -> tuple[CompletionRequest, bytes]:
    decoded = kind.decode(json.dumps(body).encode())
    request = kind.parse(decoded)
    return request, kept_body(kind, decoded, request.ignored)


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_stored_body_writes_the_same_answer(kind: AnswerKind, body: dict[str, Any]) -> None:
    whole, short = kept(kind, body)
    again = kind.parse(kind.decode(short))
    for name in (
        "choices", "n", "max_tokens", "stops", "stream", "include_usage", "continuous_usage", "echo", "is_chat",
        "must_think", "background", "repeated", "num_logprobs", "num_prompt_logprobs", "tools",
    ):  # fmt: skip
        assert getattr(again, name) == getattr(whole, name), name
    assert len(again.prompts) == len(whole.prompts)
    assert (again.grammar is None) == (whole.grammar is None)
    for name in ("return_token_ids", "skip_special_tokens", "include_stop_str_in_output", "detach_seconds"):
        assert getattr(again.fields, name) == getattr(whole.fields, name), name
    assert len(short) < 600


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
def test_fields_without_effect_are_not_stored(kind: AnswerKind) -> None:
    body = next(body for of_kind, body in BODIES if of_kind is kind)
    whole, short = kept(kind, {**body, **EXTRAS})
    names = ["x_new", *(f"f{i}" for i in range(9))]
    assert (
        list(kind.parse(kind.decode(short)).ignored) == names
        and [name for name in whole.ignored if name != "no name"] == names
    )
    assert len(short) < 600


def test_response_stores_the_fields_that_it_repeats() -> None:
    items = [{"type": "message", "role": "user", "content": "Hi", "id": "mine"}]
    body = {"input": items, "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "earlier_items": 1}
    _, short = kept(RESPONSE, {**body, "x_new": MEGABYTES, "temperature": None})
    assert json.loads(short) == {**body, "x_new": None}


def test_completion_with_echo_stores_its_prompts() -> None:
    whole, short = kept(COMPLETION, {"prompt": ["a b", "c"], "echo": True})
    assert COMPLETION.parse(COMPLETION.decode(short)).prompts == whole.prompts == ("a b", "c")


class TestRecords:
    def test_long_stored_body_is_compressed(self) -> None:
        body = {"input": [{"role": "user", "content": "I said that already. " * 2000}]}
        record, encoded = record_of(RESPONSE, body, num_prompts=1)
        assert len(encoded) < len(json.dumps(body)) / 20
        assert json.loads(record.body) == body

    def test_stored_body_of_previous_release_is_read(self) -> None:
        others = [generation("b")]
        old: dict[str, Any] = {"kind": "text_completion", "created": 1, "detach_seconds": 2.0}
        old["body"] = b'{"prompt":["a","b"]}'
        record = decode_record(msgspec.msgpack.encode({**old, "others": others}))
        assert record == AnswerRecord(
            kind="text_completion", body=old["body"], created=1, detach_seconds=2.0, others=others
        )

    def test_previous_release_reads_all_or_nothing(self) -> None:
        """During an upgrade, the previous release must never return a part of an answer."""

        class Previous(msgspec.Struct):
            kind: str
            body: bytes
            created: int
            detach_seconds: float
            others: list[GenerationRequest] = []

        _, encoded = record_of(CHAT, {"messages": HI}, num_prompts=1)
        assert CHAT.parse(CHAT.decode(msgspec.msgpack.decode(encoded, type=Previous).body)).n == 1
        for kind, body, num_prompts in ((COMPLETION, {"prompt": ["a", "b"]}, 2), (RESPONSE, {"input": NOISE}, 1)):
            _, encoded = record_of(kind, body, num_prompts)
            with pytest.raises(msgspec.ValidationError, match="body"):
                msgspec.msgpack.decode(encoded, type=Previous)

    @pytest.mark.parametrize(
        "data", [b"", b"x", packed(b"{}")[:-1], zlib.compress(bytes(MAX_UNPACKED_BYTES + 1))], ids=range(4)
    )
    def test_damaged_or_huge_stored_body_is_not_found(self, data: bytes) -> None:
        with pytest.raises(ValueError, match=r"cut short|incorrect header"):
            unpacked(data)
        if data:
            record = AnswerRecord(kind="response", created=1, detach_seconds=1, packed=data)
            assert decode_record(msgspec.msgpack.encode(record)) is None


def record_of(kind: AnswerKind, body: dict[str, Any], num_prompts: int) -> tuple[AnswerRecord, bytes]:
    planned = [generation(f"{index}") for index in range(num_prompts)]
    first, *_ = new_terms(Retention("", 1.0), planned, kind, kind.decode(json.dumps(body).encode()), (), 1)
    record = decode_record(first.record)
    assert record is not None and record.other_ids == [request.request_id for request in planned[1:]]
    return record, first.record


def generation(request_id: str) -> GenerationRequest:
    return GenerationRequest(request_id=request_id, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1, seed=1))
