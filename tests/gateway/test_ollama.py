"""Ollama's API: chats and completions as lines of JSON, the models, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.apis.ollama.schema import parse_chat
from gateway.http.json_body import decode_body
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says
from tests.tiny_model import write_tiny_model

HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def roomy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "roomy", max_model_len=4096)


@pytest.fixture
async def gateway(start_gateway: Any, roomy_model_dir: Path) -> Gateway:
    return await start_gateway(model=roomy_model_dir)


async def ask(gateway: Gateway, path: str, text: str, **body: Any) -> tuple[int, list[dict[str, Any]]]:
    token_ids = gateway.service.require_model().encoder.encode_text(text, add_special_tokens=False)
    gateway.engine.script = says(*([token_id] for token_id in token_ids))
    body = {"model": gateway.service.name, **body}
    async with gateway.session.post(path, json=body) as response:
        lines = [json.loads(line) for line in (await response.text()).splitlines()]
        if response.status == 200 and body.get("stream", True):
            assert response.content_type == "application/x-ndjson"
        return response.status, lines


def joined(lines: Sequence[dict[str, Any]], name: str = "content") -> str:
    return "".join(line["message"].get(name) or "" for line in lines)


async def test_chat_streams_lines_that_end_with_counts(gateway: Gateway) -> None:
    status, lines = await ask(gateway, "/api/chat", "Hello there.", messages=HI)
    *deltas, last = lines
    assert (status, joined(deltas)) == (200, "Hello there.")
    assert all(line["done"] is False and line["model"] == gateway.service.name for line in deltas)
    assert last["done"] is True and last["done_reason"] == "stop"
    assert last["eval_count"] > 0 and last["prompt_eval_count"] > 0


async def test_chat_without_stream_is_one_object(gateway: Gateway) -> None:
    status, [body] = await ask(gateway, "/api/chat", "Yes.", messages=HI, stream=False)
    assert (status, body["message"], body["done"]) == (200, {"role": "assistant", "content": "Yes."}, True)


async def test_calls_have_arguments_as_objects(gateway: Gateway) -> None:
    expected = [{"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}]
    for stream in (False, True):
        _, lines = await ask(gateway, "/api/chat", CALL, messages=HI, tools=[WEATHER], stream=stream)
        assert [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]] == [expected]


async def test_earlier_calls_are_rendered(gateway: Gateway) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    assert (await ask(gateway, "/api/chat", "Sunny.", messages=messages, stream=False))[0] == 200


def test_results_have_the_ids_of_the_calls_in_order() -> None:
    """As Mistral's templates require: nine characters, and one for each result."""
    call, result = {"function": {"name": "f"}}, {"role": "tool", "content": "3"}
    two, only = ({"role": "assistant", "tool_calls": [call] * number} for number in (2, 1))
    body = {"model": "tiny", "messages": [*HI, two, result, result, only, result, result]}
    (prompt,) = parse_chat(decode_body(json.dumps(body).encode())).prompts
    assert isinstance(prompt, tuple)
    ids = [message.get("tool_call_id", [one["id"] for one in message.get("tool_calls", ())]) for message in prompt[1:]]
    first, second, third = "call00000", "call00001", "call00002"
    assert ids == [[first, second], first, second, [third], third, []]


async def test_generate_answers_a_prompt(gateway: Gateway) -> None:
    _, lines = await ask(gateway, "/api/generate", "Yes.", prompt="hi", system="Be brief.")
    assert "".join(line["response"] for line in lines) == "Yes." and lines[-1]["done"] is True
    chat = gateway.engine.requests[-1].prompt_token_ids
    _, [raw] = await ask(gateway, "/api/generate", "Yes.", prompt="hi", raw=True, stream=False)
    assert raw["response"] == "Yes." and len(gateway.engine.requests[-1].prompt_token_ids) < len(chat)


async def test_options_become_sampling_parameters(gateway: Gateway) -> None:
    options = {"temperature": 0.5, "top_k": 7, "seed": 3, "num_predict": 9, "repeat_penalty": 1.5, "num_gpu": 1}
    await ask(gateway, "/api/chat", "x", messages=HI, options=options, format={"type": "object"}, stream=False)
    sampling = gateway.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.5, 7, 3, 9)
    assert sampling.repetition_penalty == 1.5 and sampling.grammar is not None


@pytest.mark.parametrize(
    ("path", "fields", "status", "says_"),
    [
        ("/api/chat", {"messages": HI, "options": {"num_ctx": 10**6}}, 400, "options.num_ctx: 1000000 exceeds"),
        ("/api/chat", {"messages": [{**HI[0], "images": ["x"]}]}, 400, "messages[0].images: not supported"),
        ("/api/chat", {"messages": []}, 400, "messages"),
        ("/api/chat", {"messages": HI, "options": {"num_predict": 10**6}}, 400, "maximum context length"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix: not supported"),
        ("/api/pull", {}, 501, "Models are chosen when this server starts"),
        ("/api/embed", {"input": "a"}, 501, "they only generate text"),
    ],
)
async def test_unsupported_requests_are_refused(
    gateway: Gateway, path: str, fields: dict[str, Any], status: int, says_: str
) -> None:
    got, [body] = await ask(gateway, path, "x", **fields)
    assert got == status and says_ in body["error"]


async def test_models_are_listed_and_shown(gateway: Gateway) -> None:
    name = gateway.service.name
    for path in ("/api/tags", "/api/ps"):
        async with gateway.session.get(path) as response:
            assert [model["name"] for model in (await response.json())["models"]] == [name]
    async with gateway.session.post("/api/show", json={"model": name + ":latest"}) as response:
        shown = await response.json()
    assert response.status == 200 and "completion" in shown["capabilities"]
    assert shown["model_info"]["context_length"] == gateway.service.require_model().max_model_len
    async with gateway.session.get("/api/version") as response:
        assert (await response.json())["version"]
