"""Invalid requests of /v1/responses get an exact status, code and field; none reaches the engine."""

from typing import Any

import pytest

from tests.gateway.conftest import MAX_MODEL_LEN, Gateway
from tests.gateway.responses import URL, WEATHER

VALUE, UNSUPPORTED, MISSING = "invalid_value", "unsupported_parameter", "missing_required_parameter"
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
STRICT = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
NAMED = {"type": "function", "name": "other"}
NAMED_WEATHER = {"type": "function", "name": "get_weather"}


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": list(parts)}]}


def namespace(*tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": "ns", "tools": list(tools)}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", **fields}}}


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, VALUE, "input"),
    ({"input": 3}, VALUE, "input"),
    ({"input": []}, VALUE, "input"),
    ({"input": ["hi"]}, VALUE, "input[0]"),
    ({"input": [{"content": "hi"}]}, MISSING, "input[0].role"),
    ({"input": [{"role": "tool", "content": "hi"}]}, VALUE, "input[0].role"),
    ({"input": [{"role": "user"}]}, MISSING, "input[0].content"),
    ({"input": [{"type": "reasoning", "summary": []}]}, VALUE, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, UNSUPPORTED, "input[0].type"),
    ({"input": [{"type": "computer_call_output", "call_id": "c"}]}, UNSUPPORTED, "input[0].type"),
    (message({"type": "input_image", "image_url": "x"}), UNSUPPORTED, "input[0].content[0].type"),
    (message({"type": "input_text", "text": "a"}, {"type": "input_file"}), UNSUPPORTED, "input[0].content[1].type"),
    (message({"type": "input_text"}), MISSING, "input[0].content[0].text"),
    (message({"type": "refusal"}, role="assistant"), MISSING, "input[0].content[0].refusal"),
    ({"input": [{**CALL, "arguments": "["}]}, VALUE, "input[0].arguments"),
    ({"input": [{**CALL, "arguments": "[1]"}]}, VALUE, "input[0].arguments"),
    ({"input": [{**CALL, "call_id": None}]}, MISSING, "input[0].call_id"),
    ({"input": [{**CALL, "name": None}]}, MISSING, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, MISSING, "input[0].output"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, MISSING, "input[0].call_id"),
    ({"input": "z" * MAX_MODEL_LEN}, "context_length_exceeded", "input"),
    ({"instructions": "z" * MAX_MODEL_LEN}, "context_length_exceeded", "input"),
    ({"max_output_tokens": MAX_MODEL_LEN}, "context_length_exceeded", "max_output_tokens"),
    ({"max_output_tokens": 0}, VALUE, "max_output_tokens"),
    ({"temperature": 2.1}, VALUE, "temperature"),
    ({"top_p": 0}, VALUE, "top_p"),
    ({"top_logprobs": 21}, VALUE, "top_logprobs"),
    ({"metadata": {"a": 1}}, VALUE, "metadata"),
    ({"metadata": {str(index): "x" for index in range(17)}}, VALUE, "metadata"),
    ({"include": ["everything"]}, VALUE, "include[0]"),
    ({"text": {"format": {"type": "xml"}}}, VALUE, "text.format.type"),
    (json_schema(name="t"), MISSING, "text.format.schema"),
    (json_schema(name="t", schema={"type": "nothing"}), "invalid_json_schema", "text.format.schema"),
    ({"text": {"verbosity": "loud"}}, VALUE, "text.verbosity"),
    (json_schema(name="t", schema={"type": "nothing"}) | {"tools": [WEATHER]}, "invalid_json_schema",
     "text.format.schema"),
    (json_schema(name="t", schema={"type": "integer"}) | {"tools": [STRICT]}, "invalid_grammar", "tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, UNSUPPORTED, "tool_choice.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, VALUE, "tool_choice"),
    ({"tools": [namespace({"type": "web_search"})]}, UNSUPPORTED, "tools[0].tools[0].type"),
    ({"tools": [namespace({"type": "namespace", "name": "m", "tools": []})]}, UNSUPPORTED, "tools[0].tools[0].type"),
    ({"tools": [namespace(WEATHER), {**WEATHER, "name": "ns__get_weather"}]}, VALUE, "tools[1].name"),
    ({"tools": [namespace({**WEATHER, "name": "f" * 125})]}, VALUE, "tools[0].tools[0].name"),
    ({"tools": [namespace(*({**WEATHER, "name": f"f{n}"} for n in range(128))), WEATHER]}, VALUE, "tools"),
    ({"tools": [{"type": "web_search"}, {**WEATHER, "parameters": {"type": "nothing"}}], "tool_choice": NAMED_WEATHER},
     "invalid_json_schema", "tools[1].parameters"),
    ({"tools": [{}]}, MISSING, "tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "ns"}]}, MISSING, "tools[0].tools"),
    ({"tools": [{"type": "function"}]}, MISSING, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, VALUE, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, VALUE, "tools[1].name"),
    ({"tools": [WEATHER] * 129}, VALUE, "tools"),
    ({"tools": [WEATHER], "tool_choice": NAMED}, VALUE, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, MISSING, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, UNSUPPORTED, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": [NAMED]}}, VALUE,
     "tool_choice.tools[0].name"),
    ({"tool_choice": "required"}, VALUE, "tool_choice"),
    ({"reasoning": {"effort": "much"}}, VALUE, "reasoning.effort"),
    ({"reasoning": {"summary": "brief"}}, VALUE, "reasoning.summary"),
    ({"truncation": "auto"}, UNSUPPORTED, "truncation"),
    ({"background": True, "store": False}, VALUE, "background"),
    ({"conversation": "conv_1"}, UNSUPPORTED, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, UNSUPPORTED, "prompt"),
    ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_not_found", "previous_response_id"),
    ({"previous_response_id": "x"}, "previous_response_not_found", "previous_response_id"),
    ({"previous_response_id": ""}, VALUE, "previous_response_id"),
    ({"detach_seconds": 3601}, VALUE, "detach_seconds"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_invalid_response_request_is_refused(gateway: Gateway, stream: bool) -> None:
    found = []
    for fields, _, _ in CASES:
        async with gateway.session.post(URL, json={"input": "hi", "stream": stream, **fields}) as reply:
            error = (await reply.json())["error"]
            assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
            assert error["param"] in error["message"] or error["code"] == "context_length_exceeded"
            found.append((reply.status, error["code"], error["param"]))
    assert found == [(400, code, param) for _, code, param in CASES]
    assert gateway.engine.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", f"/{'0' * 32}", 404, "id"),
        ("GET", "/resp_1", 404, "id"),
        ("DELETE", f"/resp_{'0' * 32}", 404, "id"),
        ("POST", f"/resp_{'0' * 32}/cancel", 404, "id"),
        ("GET", f"/resp_{'0' * 32}/input_items", 404, "id"),
        ("GET", "/x?stream=maybe", 400, "stream"),
        ("GET", "/x?starting_after=1", 400, "starting_after"),
        ("GET", "/x?stream=true&starting_after=-1", 400, "starting_after"),
        ("GET", "/x/input_items?limit=0", 400, "limit"),
        ("GET", "/x/input_items?limit=101", 400, "limit"),
        ("GET", "/x/input_items?order=up", 400, "order"),
    ],
)
async def test_unknown_response_id_is_not_found(
    gateway: Gateway, method: str, path: str, status: int, param: str
) -> None:
    async with gateway.session.request(method, URL + path) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["param"]) == (status, param)


async def test_response_request_for_unknown_model_is_refused(gateway: Gateway) -> None:
    async with gateway.session.post(URL, json={"input": "hi", "model": "gpt"}) as reply:
        assert (reply.status, (await reply.json())["error"]["param"]) == (404, "model")


async def test_unknown_fields_are_named_in_a_header(gateway: Gateway) -> None:
    async with gateway.session.post(URL, json={"input": "hi", "stream": True, "temprature": 1}) as reply:
        assert reply.headers["x-pagestream-ignored"] == "temprature"
