"""Chat and completions over a real port: content, order of chunks, and clients that leave."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from gateway.metrics import REFUSALS
from gateway.store.store_calls import QueueFull, StartsLate, StoreUnavailable
from gateway.text.served_model import ServedModel
from shared.messages import ErrorCode, ErrorEvent, FinishReason, TokenEvent, WorkerPhase
from tests.gateway.conftest import IM_END, MAX_MODEL_LEN, Gateway
from tests.gateway.fake_inference import FakeInferenceClient, finish, heartbeat, says

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def ids(model: ServedModel, text: str) -> list[int]:
    return model.encoder.encode_text(text)


async def read_events(response: aiohttp.ClientResponse) -> list[Any]:
    """Return the data of each event; the last is the string [DONE]."""
    events = []
    for block in (await response.text()).split("\n\n")[:-1]:
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


async def test_chat_answer_is_complete(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says(ids(tiny_model, "It is "), [*ids(tiny_model, "Paris"), IM_END])
    async with gateway.session.post("/v1/chat/completions", json=CHAT) as response:
        body = await response.json()
    num_tokens = len(ids(tiny_model, "It is ")) + len(ids(tiny_model, "Paris")) + 1
    prompt = tiny_model.encoder.encode_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert gateway.engine.requests[0].prompt_token_ids == prompt
    assert body == {
        "id": body["id"],
        "object": "chat.completion",
        "created": body["created"],
        "model": "tiny",
        "system_fingerprint": tiny_model.fingerprint,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "It is Paris", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_tokens,
            "total_tokens": len(prompt) + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    assert body["id"].startswith("chatcmpl-")


async def test_tokens_that_arrive_together_get_one_event_each(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says(ids(tiny_model, "abcde"))
    async with gateway.session.post("/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
        events = await read_events(response)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["a", "b", "c", "d", "e", ""]


async def test_chat_chunks_are_in_order(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says(ids(tiny_model, "ab"), ids(tiny_model, "cd"), reason=FinishReason.LENGTH)
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with gateway.session.post("/v1/chat/completions", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        events = await read_events(response)
    assert events.pop() == "[DONE]"
    assert {(event["id"], event["object"], event["created"], event["model"]) for event in events} == {
        (events[0]["id"], "chat.completion.chunk", events[0]["created"], "tiny")
    }
    choices = [event["choices"] for event in events]
    assert choices == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        *([{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}] for text in "abcd"),
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}],
        [],
    ]
    assert [event["usage"] for event in events[:-1]] == [None] * 6
    assert events[-1]["usage"]["completion_tokens"] == 4


async def test_chunks_have_no_usage_unless_requested(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says(ids(tiny_model, "ab"))
    async with gateway.session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        events = await read_events(response)
    assert all("usage" not in event for event in events[:-1])


async def test_every_chunk_has_usage_if_requested(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says(ids(tiny_model, "ab"), ids(tiny_model, "cde"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with gateway.session.post(
        "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": options}
    ) as response:
        events = await read_events(response)
    texts = [event for event in events[:-1] if event["choices"] and "content" in event["choices"][0]["delta"]]
    assert [event["usage"]["completion_tokens"] for event in texts[1:]] == [1, 2, 3, 4, 5]


async def test_completion_chunks_are_in_order(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says(ids(tiny_model, "ab"))
    body = {"prompt": "Hi", "stream": True}
    async with gateway.session.post("/v1/completions", json=body) as response:
        events = await read_events(response)
    assert [event["choices"][0] for event in events[:-1]] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "b", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"},
    ]
    assert events[0]["object"] == "text_completion"
    assert gateway.engine.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts_are_numbered(gateway: Gateway, tiny_model: ServedModel, stream: bool) -> None:
    def names_its_prompt(request: Any) -> Any:
        return says(request.prompt_token_ids)(request)

    gateway.engine.script = names_its_prompt
    body = {"prompt": ["one", "two"], "n": 2, "seed": 7, "stream": stream}
    async with gateway.session.post("/v1/completions", json=body) as response:
        if stream:
            texts = ["", "", "", ""]
            for event in (await read_events(response))[:-1]:
                texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        else:
            answer = await response.json()
            texts = [choice["text"] for choice in answer["choices"]]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert answer["usage"]["prompt_tokens"] == len(ids(tiny_model, "one")) + len(ids(tiny_model, "two"))
    assert texts == ["one", "one", "two", "two"]
    assert [(request.sampling.seed, request.sampling.n) for request in gateway.engine.requests] == [(7, 2)] * 2
    assert len({request.request_id for request in gateway.engine.requests}) == 2


async def test_token_id_prompt_is_echoed(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says(ids(tiny_model, "!"))
    prompt = ids(tiny_model, "Hello")
    async with gateway.session.post("/v1/completions", json={"prompt": prompt, "echo": True}) as response:
        assert (await response.json())["choices"][0]["text"] == "Hello!"
    assert gateway.engine.requests[0].prompt_token_ids == prompt


async def test_stop_string_across_chunks_ends_the_request(gateway: Gateway, tiny_model: ServedModel) -> None:
    async with gateway.session.post(
        "/v1/chat/completions", json={**CHAT, "stream": True, "stop": ["XYZ"], "max_tokens": 50}
    ) as response:
        stream = await gateway.engine.next_stream()
        request_id = stream.request.request_id
        for index, character in enumerate("abXYZcd"):
            stream.send(TokenEvent(request_id, index, ids(tiny_model, character)))
        events = await read_events(response)
    texts = [event["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert texts == ["", "a", "b", "", "", None]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert await gateway.engine.next_cancellation() == request_id
    assert gateway.metric("pagestream_gateway_choices_finished_total", reason="stop") == 1


async def test_first_token_is_sent_at_once(gateway: Gateway, tiny_model: ServedModel) -> None:
    async with gateway.session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        stream = await gateway.engine.next_stream()
        assert response.status == 200  # accepted, and nothing generated yet
        stream.send(TokenEvent(stream.request.request_id, 0, ids(tiny_model, "a")))
        assert b'"content":"a"' in await response.content.readany()
        stream.send(finish(stream.request, 1))
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_characters_are_sent_whole(gateway: Gateway, tiny_model: ServedModel) -> None:
    tokens = ids(tiny_model, "é🎉")
    assert len(tokens) == 6
    gateway.engine.script = says(*[[token] for token in tokens])
    async with gateway.session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        events = await read_events(response)
    texts = [event["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert texts == ["", "", "é", "", "", "", "🎉", None]


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_is_cancelled(gateway: Gateway, stream: bool) -> None:
    post = asyncio.create_task(gateway.session.post("/v1/chat/completions", json={**CHAT, "stream": stream, "n": 2}))
    request_id = (await gateway.engine.next_stream()).request.request_id
    if stream:
        (await post).close()
    else:
        post.cancel()
    assert await gateway.engine.next_cancellation() == request_id
    assert gateway.metric("pagestream_gateway_choices_finished_total", reason="cancelled") == 2


async def test_engine_error_after_the_headers_is_an_event(gateway: Gateway, tiny_model: ServedModel) -> None:
    async with gateway.session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        stream = await gateway.engine.next_stream()
        request_id = stream.request.request_id
        stream.send(TokenEvent(request_id, 0, ids(tiny_model, "a")))
        stream.send(ErrorEvent(request_id, ErrorCode.REQUEST_FAILED, "at /srv/model"))
        events = await read_events(response)
    assert events[-1] == "[DONE]"
    assert events[-2] == {
        "error": {
            "message": "The engine could not complete this request.",
            "type": "server_error",
            "param": None,
            "code": "request_failed",
        }
    }
    assert gateway.engine.cancelled == []


@pytest.mark.parametrize(
    ("code", "status", "error_type"),
    [
        (ErrorCode.REQUEST_FAILED, 500, "server_error"),
        (ErrorCode.INVALID_REQUEST, 400, "invalid_request_error"),
        (ErrorCode.CAPACITY_EXCEEDED, 400, "invalid_request_error"),
    ],
)
async def test_engine_error_without_a_stream_is_a_status(
    gateway: Gateway, code: ErrorCode, status: int, error_type: str
) -> None:
    gateway.engine.script = lambda request: [ErrorEvent(request.request_id, code, "too large")]
    async with gateway.session.post("/v1/chat/completions", json=CHAT) as response:
        body = await response.json()
    assert (response.status, body["error"]["type"], body["error"]["code"]) == (status, error_type, code.value)


async def test_series_of_refusals_begin_at_zero(gateway: Gateway) -> None:
    for reason in REFUSALS:
        assert gateway.metric("pagestream_requests_rejected_total", reason=reason) == 0


@pytest.mark.parametrize(
    ("error", "code"), [(QueueFull("cap"), "queue_full"), (StoreUnavailable("down"), "store_unavailable")]
)
async def test_refusal_by_the_store_is_a_status(gateway: Gateway, error: Exception, code: str) -> None:
    gateway.engine.submit_error = error
    async with gateway.session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        body = await response.json()
    assert (response.status, body["error"]["type"], body["error"]["code"]) == (503, "overloaded_error", code)
    assert response.headers["Retry-After"] == "2" and response.headers["x-should-retry"] == "true"
    assert gateway.metric("pagestream_requests_rejected_total", reason=code) == 1


async def test_request_that_would_start_too_late_is_told_when_to_come_back(gateway: Gateway) -> None:
    gateway.engine.submit_error = StartsLate(num_ahead=120, per_second=8.0, limit_seconds=5.0)
    async with gateway.session.post("/v1/chat/completions", json={**CHAT, "queue_timeout_seconds": 5}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (429, "queue_wait_exceeded")
    assert "120 requests wait before this one, for about 15 s" in error["message"]
    assert response.headers["Retry-After"] == "10" and response.headers["x-should-retry"] == "true"
    assert gateway.metric("pagestream_requests_rejected_total", reason="queue_wait_exceeded") == 1


async def test_prompts_are_submitted_together(gateway: Gateway) -> None:
    """If there is no room for all, none is submitted: tests/integration/test_repeats.py."""
    gateway.engine.submit_error = QueueFull("cap")
    async with gateway.session.post("/v1/completions", json={"prompt": ["a", "b", "c"]}) as response:
        assert response.status == 503
    assert gateway.engine.requests == []


@pytest.mark.parametrize(
    ("workers", "code"),
    [([], "starting"), ([heartbeat(phase=WorkerPhase.LOAD)], "starting"), ([heartbeat("supervisor")], "starting")],
)
async def test_request_before_the_first_worker_is_refused(start_gateway: Any, workers: list[Any], code: str) -> None:
    engine = FakeInferenceClient(says([5]))
    engine.workers = workers
    gateway = await start_gateway(engine)
    async with gateway.session.post("/v1/chat/completions", json=CHAT) as response:
        body = await response.json()
    assert (response.status, body["error"]["code"]) == (503, code)
    assert int(response.headers["Retry-After"]) >= 1


async def test_request_after_all_workers_left_is_refused(start_gateway: Any) -> None:
    gateway = await start_gateway(no_worker="refuse")
    async with gateway.session.get("/ready") as response:
        assert response.status == 200
    gateway.engine.workers = []
    async with gateway.session.post("/v1/chat/completions", json=CHAT) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "no_worker")


async def test_draining_gateway_refuses_new_and_finishes_open_requests(
    gateway: Gateway, tiny_model: ServedModel
) -> None:
    async with gateway.session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        stream = await gateway.engine.next_stream()
        gateway.state.open_requests.draining = True
        async with gateway.session.post("/v1/chat/completions", json=CHAT) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
        assert not await gateway.state.open_requests.wait_idle(0.01)
        stream.send(finish(stream.request, 0))
        assert (await response.text()).endswith("[DONE]\n\n")
    assert await gateway.state.open_requests.wait_idle(5)


async def test_full_gateway_refuses(start_gateway: Any) -> None:
    gateway = await start_gateway(max_num_streams=1)
    async with gateway.session.post("/v1/chat/completions", json={**CHAT, "stream": True}):
        await gateway.engine.next_stream()
        async with gateway.session.post("/v1/chat/completions", json=CHAT) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "gateway_full")


async def test_ignored_fields_are_named(gateway: Gateway) -> None:
    gateway.engine.script = says([5])
    hint = {"prediction": {"type": "content", "content": "hi"}}
    body = {**CHAT, **hint, "user": "me", "guided_jsn": "{}", "x\r\nevil": 1, "logprobs": None, "temprature": 0}
    async with gateway.session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["x-pagestream-ignored"] == "prediction, guided_jsn, temprature"


@pytest.mark.parametrize(
    ("sent", "kept"), [("job-7.a_B", True), ("x" * 64, True), ("x" * 65, False), ("a b", False), ("é", False)]
)
async def test_request_id_is_returned(gateway: Gateway, sent: str, kept: bool) -> None:
    gateway.engine.script = says([5])
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/nope", {}),
    ):
        async with gateway.session.post(path, json=body, headers={"x-request-id": sent}) as response:
            answered = response.headers["x-request-id"]
            assert (answered == sent) is kept and len(answered) >= 9
    assert all(request.request_id != sent for request in gateway.engine.requests)


async def test_sampling_fields_reach_the_engine(gateway: Gateway) -> None:
    gateway.engine.script = says([5])
    body = {
        **CHAT,
        "max_tokens": 9,
        "max_completion_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100},
        "seed": -3,
        "stop_token_ids": [9],
        "min_tokens": 2,
        "ignore_eos": True,
    }
    async with gateway.session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
    sampling = gateway.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (8, 2, 2**63 - 3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.ignore_eos) == ({7: -100.0}, (9,), True)


async def test_omitted_fields_have_defaults(gateway: Gateway) -> None:
    gateway.engine.script = says([5])
    async with gateway.session.post(
        "/v1/chat/completions", json={**CHAT, "temperature": None, "seed": None}
    ) as response:
        assert response.status == 200
    request = gateway.engine.requests[0]
    assert request.sampling.max_tokens == MAX_MODEL_LEN - len(request.prompt_token_ids)
    assert request.sampling.temperature == 1.0


async def test_context_of_workers_limits_the_gateway(gateway: Gateway) -> None:
    gateway.engine.script = says([5])
    gateway.engine.workers = [heartbeat(max_model_len=100), heartbeat("w.2", max_model_len=64)]
    async with gateway.session.post("/v1/completions", json={"prompt": "a" * 64}) as response:
        assert response.status == 200  # the worker with the longer context takes it
    async with gateway.session.post("/v1/completions", json={"prompt": "a" * 100}) as response:
        body = await response.json()
    assert (response.status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "100 tokens" in body["error"]["message"]
