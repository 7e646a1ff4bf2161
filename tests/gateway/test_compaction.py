"""/v1/responses/input_tokens and /compact with a scripted engine: counts, summaries and continued conversations."""

import json
from typing import Any

import pytest
from openai.types.responses import CompactedResponse

from gateway.apis.responses.body import unwrapped, wrapped
from shared.messages import FinishReason
from tests.gateway.conftest import Gateway
from tests.gateway.responses import URL, WEATHER, asked, model_says
from tests.tiny_model import write_tiny_model

COUNT, COMPACT = f"{URL}/input_tokens", f"{URL}/compact"
CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
CUT = wrapped("a")[:-1]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Rome?"},
    CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {"role": "assistant", "content": "Sunny."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And Oslo?"}]},
]


@pytest.fixture(scope="module")
def roomy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "roomy", max_model_len=4096)


@pytest.fixture
async def gateway(start_gateway: Any, roomy_model_dir: Any) -> Gateway:
    return await start_gateway(model=roomy_model_dir)


async def posted(gateway: Gateway, url: str, **body: Any) -> Any:
    async with gateway.session.post(url, json=body) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        return answer


def prompt_of(gateway: Gateway) -> str:
    decode = gateway.service.require_model().encoder.decode
    return decode(gateway.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hi"},
        {"input": TALK, "instructions": "be", "tools": [WEATHER], "parallel_tool_calls": False},
        {"input": "hi", "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}},
        {"input": "hi", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}},
    ],
)
async def test_input_token_count_equals_usage(gateway: Gateway, fields: dict[str, Any]) -> None:
    counted = await posted(gateway, COUNT, **fields)
    assert gateway.engine.requests == []
    model_says(gateway, '{"city": "Rome"}')
    used = (await asked(gateway.session, **fields)).usage
    assert used is not None and counted == {"object": "response.input_tokens", "input_tokens": used.input_tokens}


async def test_conversation_is_compacted_and_continued(gateway: Gateway) -> None:
    num_tokens = model_says(gateway, "They asked of Rome: sunny. Oslo is open. é")
    compacted = await posted(gateway, COMPACT, model="roomy", input=TALK, instructions="be")
    typed = CompactedResponse.construct(**compacted)
    assert typed.object == "response.compaction" and typed.id.startswith("resp_")
    *said, summary = compacted["output"]
    assert [(item["type"], item["role"], item["status"], item["content"][0]["text"]) for item in said] == [
        ("message", "user", "completed", "Rome?"), ("message", "user", "completed", "And Oslo?"),
    ]  # fmt: skip
    assert len({item["id"] for item in compacted["output"]}) == 3
    assert set(summary) == {"id", "type", "encrypted_content"} and summary["type"] == "compaction"
    assert unwrapped(summary["encrypted_content"]) == "They asked of Rome: sunny. Oslo is open. é"
    request = gateway.engine.requests[-1]
    usage = compacted["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(request.prompt_token_ids), num_tokens)
    assert request.sampling.max_tokens == 1024
    prompt = prompt_of(gateway)
    assert prompt.startswith("<|im_start|>system\nbe<|im_end|>") and "Summarize our conversation" in prompt
    # The output is valid input; it contains the user messages from before the summary once.
    model_says(gateway, "Rain.")
    response = await asked(gateway.session, input=[*compacted["output"], {"role": "user", "content": "So?"}])
    assert response.output_text == "Rain."
    turns = ["user\nRome?\n\nAnd Oslo?", "assistant\nThey asked of Rome: sunny. Oslo is open. é", "user\nSo?"]
    rendered = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert prompt_of(gateway) == rendered + "<|im_start|>assistant\n"
    # The result can be compacted again.
    model_says(gateway, "Twice.")
    again = await posted(gateway, COMPACT, input=[*compacted["output"], {"role": "user", "content": "So?"}])
    assert [item["type"] for item in again["output"]] == ["message", "message", "message", "compaction"]


async def test_text_input_is_compacted_and_summary_may_be_truncated(gateway: Gateway) -> None:
    model_says(gateway, "Hm", reason=FinishReason.LENGTH)
    compacted = await posted(gateway, COMPACT, input="hi", max_output_tokens=2)
    assert [item["type"] for item in compacted["output"]] == ["message", "compaction"]
    assert gateway.engine.requests[-1].sampling.max_tokens == 2


async def test_summary_excludes_reasoning(start_gateway: Any, roomy_model_dir: Any) -> None:
    gateway = await start_gateway(model=roomy_model_dir, reasoning_parser="qwen3")
    model_says(gateway, "<think>hm</think>Short.")
    compacted = await posted(gateway, COMPACT, input="hi")
    assert unwrapped(compacted["output"][-1]["encrypted_content"]) == "Short."
    assert compacted["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")


@pytest.mark.parametrize("url", [COUNT, COMPACT])
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": 3}, 400, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
        ({"input": [{"type": "compaction"}]}, 400, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, 400, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": CUT}]}, 400, "input[0].encrypted_content"),
        ({"input": "hi", "model": "other"}, 404, "model"),
        ({"input": "hi", "previous_response_id": f"resp_{'0' * 32}"}, 400, "previous_response_id"),
        ({"input": "hi", "conversation": "c"}, 400, "conversation"),
    ],
)
async def test_invalid_compaction_is_refused(
    gateway: Gateway, url: str, fields: dict[str, Any], status: int, param: str
) -> None:
    async with gateway.session.post(url, json=fields) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["param"]) == (status, param)
    assert error["param"] in error["message"] or status == 404 or error["code"] == "context_length_exceeded"
    assert gateway.engine.requests == []


async def test_input_that_does_not_fit_is_counted_but_not_compacted(gateway: Gateway) -> None:
    counted = await posted(gateway, COUNT, input="z" * 5000)
    assert counted["input_tokens"] > 5000
    async with gateway.session.post(COMPACT, json={"input": "z" * 5000}) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("text", ["", "é\n\u2028" * 100, "a"])
def test_wrapped_summary_is_unwrapped(text: str) -> None:
    assert unwrapped(wrapped(text)) == text and json.dumps(wrapped(text)).isascii()
