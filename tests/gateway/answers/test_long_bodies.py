"""Bodies with many choices are built in place, choice by choice: building one at once would block the interpreter."""

import itertools
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from gateway.apis.chat.format import ChatFormat
from gateway.apis.completions.format import CompletionFormat
from gateway.pipeline.choice_writer import ChoiceDelta
from gateway.pipeline.response_format import ChoiceResult, ReplyHeader, UsageCount
from gateway.store.inbox import MAX_READ_SCORES
from gateway.text import logprobs
from gateway.text.logprobs import LogprobEntry
from gateway.text.long_json import PIECE_BYTES, LongArray, json_pieces
from gateway.text.served_model import ServedModel
from shared.messages import FinishReason, GenerationRequest, PromptLogprobs, StreamEvent, TokenEvent
from tests.gateway.answers.test_prompt_echo import CHAT
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import Script, finish
from tests.gateway.test_turns import TINY_SLICE_SECONDS, turns_of_others
from tests.gateway.text.test_logprobs import scored

NUM_CHOICES = 8
NUM_TOKENS = 200
PROMPT = [5 + place % 90 for place in range(NUM_TOKENS + 1)]
SCORED_RESPONSE = {
    "input": "x", "store": False, "max_output_tokens": NUM_TOKENS,
    "top_logprobs": 1, "include": ["message.output_text.logprobs"],
}  # fmt: skip
LONG = [{"role": "user", "content": "x" * NUM_TOKENS}]


class Tracked(msgspec.Struct, weakref=True):
    """A value inside a choice; it is freed once the choice is written."""

    number: int


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
def test_written_choice_is_freed(form: type[ChatFormat | CompletionFormat]) -> None:
    alive: list[weakref.ref[Tracked]] = []

    def choices() -> Iterator[ChoiceResult]:
        for index in range(NUM_CHOICES):
            assert sum(tracked() is not None for tracked in alive) <= 1
            tracked = Tracked(index)
            alive.append(weakref.ref(tracked))
            yield ChoiceResult(index, f"text {index}", "length", extra={"tracked": tracked})

    body = json.loads(
        form(ReplyHeader(response_id="id", model="model", created=1)).body(choices(), UsageCount(1, 2), {"more": True})
    )
    assert [choice["index"] for choice in body["choices"]] == list(range(NUM_CHOICES))
    assert body["usage"]["total_tokens"] == 3
    assert body["more"] is True
    assert body["object"] == form.body_object


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
@pytest.mark.parametrize("num_at_once", [1, 7, 64])
def test_logprobs_in_pieces_equal_logprobs_at_once(
    form: type[ChatFormat | CompletionFormat],
    num_at_once: int,
    tiny_model: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare byte for byte, with a first token without logprobs, and at the limits of pieces."""
    monkeypatch.setattr("gateway.text.long_json.PIECE_BYTES", 100)
    spellings = tiny_model.encoder.spellings(by_id=False)
    entries = [LogprobEntry(70 + place % 9, scored(70) if place else None, place, spellings) for place in range(64)]
    written = form(ReplyHeader(response_id="id", model="model", created=1))
    for start in range(0, len(entries), num_at_once):
        group = tuple(entries[start : start + num_at_once])
        left = written.collect(ChoiceDelta(0, "x", None, group, (70,)))
        assert left == ChoiceDelta(0, "x", None, (), (70,))
    results = [ChoiceResult(0, "x", "stop", has_logprobs=True), ChoiceResult(1, "y", "stop", has_logprobs=True)]
    body = bytes(written.body([*results, ChoiceResult(2, "z", "stop")], UsageCount(1, 2), {"more": None}))
    choices = json.loads(body)["choices"]
    for choice, expected in ((choices[0], form.logprobs(entries)), (choices[1], form.logprobs(()))):
        assert msgspec.json.encode({"logprobs": expected})[1:-1] in body
        assert choice["logprobs"] == json.loads(msgspec.json.encode(expected))
    assert choices[2]["logprobs"] is None


def test_body_pieces_do_not_exceed_the_piece_limit() -> None:
    array = LongArray()
    for _ in range(1000):
        array.extend(b'["' + b"x" * 1000 + b'"]')
    sizes = [len(piece) for piece in json_pieces({"long": [], "logprobs": {"content": array}})]
    assert sum(sizes) > 1000 * 1000
    assert max(sizes) < PIECE_BYTES + 1010


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": [5], "logprobs": 1}),
        ("completions", {"prompt": [5], "logprobs": 1, "best_of": 2}),
        ("completions", {"prompt": [5], "logprobs": 1, "best_of": 2, "stream": True}),
        ("completions", {"prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 1}),
        ("chat/completions", {"messages": CHAT["messages"], "logprobs": True, "top_logprobs": 1}),
        ("responses", SCORED_RESPONSE),
        ("responses", {**SCORED_RESPONSE, "stream": True}),
        ("chat/completions", {"messages": LONG, "prompt_logprobs": 1, "max_tokens": 1}),
    ],
)
async def test_logprobs_are_written_in_time_slices_of_their_key(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    """Leave nothing to a thread, which would hold the interpreter for half a second beside the event loop."""
    monkeypatch.setattr("gateway.work.loop_scheduler.SLICE_SECONDS", TINY_SLICE_SECONDS)
    gateway.engine.script = scores_all(asked.get("best_of", 1))
    written: list[tuple[int, int]] = []  # (thread id, time slices of others so far)
    async with turns_of_others() as turns:
        for name in ("_object", "_by_text", "_ranked"):
            write = getattr(logprobs, name)

            def watched(*arguments: Any, name: str = name, write: Callable[..., bytes] = write) -> bytes:
                num_tokens = len(arguments[1]) if name == "_ranked" else 1
                written.extend([(threading.get_ident(), turns.count)] * num_tokens)
                return write(*arguments)

            monkeypatch.setattr(logprobs, name, watched)
        async with gateway.session.post(
            f"/v1/{path}", json=asked if path == "responses" else {"max_tokens": NUM_TOKENS, **asked}
        ) as reply:
            assert reply.status == 200, await reply.text()
            text = await reply.text()
    assert text.count('"logprob') >= 1 and len(written) >= NUM_TOKENS
    assert {thread for thread, _ in written} == {threading.get_ident()}
    assert max(Counter(turn for _, turn in written).values()) <= 2 * MAX_READ_SCORES  # a response has two forms of each


def scores_all(num_samples: int) -> Script:
    """Score the prompt, and each of the requested tokens of every sample."""

    def script(request: GenerationRequest) -> Iterator[StreamEvent]:
        if request.sampling.prompt_logprobs is not None:
            scores = PromptLogprobs(1, [scored(token_id) for token_id in request.prompt_token_ids[1:]])
            yield TokenEvent(request.request_id, 0, [], prompt_logprobs=scores)
        num_tokens, has_logprobs = request.sampling.max_tokens, request.sampling.logprobs is not None
        for choice, index in itertools.product(range(num_samples), range(num_tokens)):
            reason = FinishReason.LENGTH if num_samples > 1 and index == num_tokens - 1 else None
            yield TokenEvent(request.request_id, index, [70], choice, reason, [scored(70)] if has_logprobs else None)
        yield finish(request, num_samples * num_tokens, FinishReason.LENGTH)

    return script


async def test_response_events_have_the_same_logprobs(gateway: Gateway) -> None:
    """Compare deltas, the three events with the whole text, the end of the stream, and the unstreamed response."""
    gateway.engine.script = scores_all(1)
    async with gateway.session.post("/v1/responses", json=SCORED_RESPONSE) as reply:
        whole = (await reply.json())["output"]
    async with gateway.session.post("/v1/responses", json={**SCORED_RESPONSE, "stream": True}) as reply:
        lines = (await reply.text()).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    by_kind = {event["type"]: event for event in events}
    scores = whole[0]["content"][0]["logprobs"]
    assert len(scores) == NUM_TOKENS and all(entry["bytes"] for entry in scores)
    assert by_kind["response.content_part.done"]["part"]["logprobs"] == scores
    assert by_kind["response.output_item.done"]["item"]["content"][0]["logprobs"] == scores
    assert by_kind["response.incomplete"]["response"]["output"][0]["content"][0]["logprobs"] == scores
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    without_bytes = [
        {
            name: [{key: top[key] for key in ("token", "logprob")} for top in field]
            if name == "top_logprobs"
            else field
            for name, field in entry.items()
            if name != "bytes"
        }
        for entry in scores
    ]
    assert [entry for entries in deltas for entry in entries] == without_bytes
    assert by_kind["response.output_text.done"]["logprobs"] == without_bytes
