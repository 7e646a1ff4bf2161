"""Long answers yield to other tasks while they are parsed, written, and built."""

import asyncio
import json
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.apis.completions.schema import parse_completion
from gateway.apis.responses.items import OutputItems
from gateway.http.json_body import decode_body
from gateway.pipeline import reply as pipeline_reply
from gateway.pipeline.answer_extras import ENTRIES_OF_PIECE, TOKENS_OF_STEP, PromptEcho
from gateway.pipeline.choice_writer import Backlog, ChoiceDelta
from gateway.store.inbox import MAX_READ_SCORES, MAX_READ_TOKENS, Inbox
from gateway.text.served_model import ServedModel
from shared.messages import (
    FinishEvent,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StoredChoice,
    TokenEvent,
    TokenLogprobs,
    Usage,
    decoded_logprobs,
    encoded_logprobs,
)
from tests.gateway.answers.test_prompt_echo import scores_prompt_and_says
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says
from tests.gateway.responses import checked_events

NUM_TOKENS = 200
TINY_SLICE_SECONDS = 1e-9  # shorter than any work
BODY = {"prompt": [5], "max_tokens": NUM_TOKENS}


class Turns:
    def __init__(self) -> None:
        self.count = 0


@asynccontextmanager
async def turns_of_others() -> AsyncIterator[Turns]:
    """Count how often another task gets the event loop."""
    turns = Turns()

    async def take() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(take())
    yield turns
    task.cancel()


@pytest.mark.parametrize("body", [BODY, {**BODY, "stream": True}, {**BODY, "stream": True, "n": 2}])
async def test_ready_answer_is_written_in_time_slices(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    gateway.engine.script = says(*([5] for _ in range(NUM_TOKENS)))
    counts = []
    for seconds in (TINY_SLICE_SECONDS, 3600.0):
        monkeypatch.setattr("gateway.work.loop_scheduler.SLICE_SECONDS", seconds)
        async with turns_of_others() as turns, gateway.session.post("/v1/completions", json=body) as reply:
            text = await reply.text()
            counts.append(turns.count)
        assert text.count("finish_reason") >= 1 and "error" not in text
    assert counts[0] >= counts[1] + NUM_TOKENS / 2, "one time slice per token if each token fills a slice"


def test_collected_choice_keeps_no_delta() -> None:
    """After a disconnect, 16,000 deltas with 20 logprobs each would stop the loop for 70 ms while they are freed."""
    delta = ChoiceDelta(0, "ab", FinishReason.LENGTH, (), (5, 6), "c")
    num_references = sys.getrefcount(delta)
    collector = pipeline_reply.Collector(1, lambda delta: delta)
    collector.write(delta, bytearray())
    assert sys.getrefcount(delta) == num_references
    (choice,) = collector.choices
    assert (choice.text.getvalue(), choice.reasoning.getvalue()) == ("ab", "c")
    assert (list(choice.token_ids), choice.finish_name) == ([5, 6], "length")


@pytest.mark.parametrize("counts", [{}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}])
async def test_nothing_is_lost_between_time_slices(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, counts: dict[str, Any]
) -> None:
    monkeypatch.setattr("gateway.work.loop_scheduler.SLICE_SECONDS", TINY_SLICE_SECONDS)
    gateway.engine.script = says(*([5] for _ in range(NUM_TOKENS)), reason=FinishReason.LENGTH)
    body = {**BODY, "stream": True, "prompt": [[5], [6]], "n": 2, "return_token_ids": True, **counts}
    async with gateway.session.post("/v1/completions", json=body) as reply:
        lines = (await reply.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    for index in range(4):
        own = [choice for choice in choices if choice["index"] == index]
        assert [id_ for choice in own for id_ in choice.get("token_ids", ())] == [5] * NUM_TOKENS
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]


async def test_long_bodies_are_built_on_a_thread(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    make = pipeline_reply.Delivery._body_of

    def watched(*arguments: Any) -> bytes | bytearray:
        threads.append(threading.get_ident())
        return make(*arguments)

    monkeypatch.setattr(pipeline_reply.Delivery, "_body_of", watched)
    for num_tokens in (10, 2000):
        gateway.engine.script = says([5] * num_tokens)
        async with gateway.session.post("/v1/completions", json={"prompt": [5]}) as reply:
            assert (await reply.json())["usage"]["completion_tokens"] == num_tokens
    assert threads[0] == threading.get_ident() != threads[1]


async def test_repeating_end_event_is_built_on_a_thread(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four events of a response repeat the whole text, with all logprobs."""
    threads: list[int] = []
    close = OutputItems.close

    def watched(output: OutputItems, status: str) -> bytes:
        threads.append(threading.get_ident())
        return close(output, status)

    monkeypatch.setattr(OutputItems, "close", watched)
    for num_tokens in (10, 2000):
        gateway.engine.script = says([70] * num_tokens)
        threads.clear()
        async with gateway.session.post("/v1/responses", json={"input": "x", "stream": True, "store": False}) as reply:
            events = checked_events(await reply.text())
        response: Any = events[-1]
        assert response.response.usage.output_tokens == num_tokens == len(response.response.output_text)
        assert (threads[-1] == threading.get_ident()) == (num_tokens == 10)


async def test_long_prompt_of_ids_is_read_in_pieces(gateway: Gateway, tiny_model: ServedModel) -> None:
    """Read it once for all its choices, and yield between two pieces."""
    encoder = tiny_model.encoder
    prompt = [5 + place % 90 for place in range(4 * TOKENS_OF_STEP + 1)]
    request = parse_completion(decode_body(json.dumps({"prompt": prompt, "echo": True, "n": 2}).encode()))
    backlog: Backlog = deque()
    echo = PromptEcho(encoder, request, [prompt], [{}], backlog)
    for delta in (ChoiceDelta(0, "!", None), ChoiceDelta(1, "?", None)):
        echo.write(delta, bytearray())
    pieces = [piece for deltas, _ in backlog for piece in deltas]
    text = encoder.decode(prompt, skip_special_tokens=False)
    assert [piece and piece.text for piece in pieces] == [None] * 6 + [text + "!", text + "?"]


async def test_logprobs_of_a_long_prompt_arrive_in_pieces(gateway: Gateway, tiny_model: ServedModel) -> None:
    prompt = list(range(5, 5 + 3 * ENTRIES_OF_PIECE + 1))
    gateway.engine.script = scores_prompt_and_says([70])
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True}
    async with gateway.session.post("/v1/completions", json=body) as reply:
        (whole,) = (await reply.json())["choices"]
    async with gateway.session.post("/v1/completions", json={**body, "stream": True}) as reply:
        lines = (await reply.text()).split("\n\n")[:-2]
    choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert max(len(piece["tokens"]) for piece in pieces) <= ENTRIES_OF_PIECE + 1
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for piece in pieces for entry in piece[field]] == whole["logprobs"][field]


@pytest.mark.parametrize(("has_scores", "max_tokens_per_event"), [(False, MAX_READ_TOKENS), (True, MAX_READ_SCORES)])
def test_event_has_a_maximum_of_tokens(has_scores: bool, max_tokens_per_event: int) -> None:
    sampling = SamplingParams(max_tokens=5000, seed=0, n=2, logprobs=0 if has_scores else None)
    stream = Inbox(GenerationRequest(request_id="a", prompt_token_ids=[1], sampling=sampling))
    num_tokens = 2 * max_tokens_per_event + 1
    tokens = list(range(num_tokens))
    scores = {index: encoded_logprobs(TokenLogprobs(-float(index), (), ())) for index in tokens} if has_scores else {}
    choices = [StoredChoice(list(tokens), FinishReason.STOP, dict(scores)) for _ in range(2)]
    usage = Usage(prompt_tokens=1, completion_tokens=2 * num_tokens)
    stream.add_journal(choices, FinishEvent("a", FinishReason.STOP, usage))
    read: dict[int, list[int]] = {0: [], 1: []}
    while not isinstance(event := stream.read(), FinishEvent):
        assert isinstance(event, TokenEvent) and 0 < len(event.token_ids) <= max_tokens_per_event
        assert event.index == len(read[event.choice])
        assert [score.logprob for score in decoded_logprobs(event.logprobs or ())] == [
            -float(id_) for id_ in event.token_ids if has_scores
        ]
        read[event.choice] += event.token_ids
        assert (event.finish_reason is None) == (len(read[event.choice]) < num_tokens)
    assert read == {0: tokens, 1: tokens}
