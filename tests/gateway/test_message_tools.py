"""Tools and thinking in the Messages API: prompt, grammar, and the returned content blocks."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.apis.anthropic.schema import parse_messages
from gateway.http.json_body import decode_body
from shared.messages import FinishReason
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says
from tests.tiny_model import write_tiny_model

URL = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}
CLOCK = {"name": "clock", "type": "custom"}
HI: dict[str, Any] = {
    "model": "roomy",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [WEATHER, CLOCK],
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
THINKING = {"type": "enabled", "budget_tokens": 100}


@pytest.fixture(scope="module")
def roomy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "roomy", max_model_len=4096)


@pytest.fixture
async def gateway(start_gateway: Any, roomy_model_dir: Path) -> Gateway:
    return await start_gateway(model=roomy_model_dir, reasoning_parser="qwen3")


async def ask(gateway: Gateway, text: str, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Any:
    """Return (blocks, stop reason) of a model that says `text`: streamed and whole, which must be equal."""
    encoder = gateway.service.require_model().encoder
    gateway.engine.script = says(*([token_id] for token_id in encoder.encode_text(text)), reason=reason)
    async with gateway.session.post(URL, json={**HI, **fields}) as response:
        whole = await response.json()
        assert response.status == 200, whole
    async with gateway.session.post(URL, json={**HI, **fields, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    blocks, stop_reason, usage = joined(events)
    for block, same in zip(blocks, whole["content"], strict=True):
        # half a call is dropped from a whole answer, but was already streamed
        if block["type"] == "tool_use" and reason is FinishReason.LENGTH:
            assert same["input"] == {}
        elif block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
            assert block == same | {"id": block["id"]} and block["id"].startswith("toolu_")
        else:
            assert block == same
    assert (stop_reason, usage) == (whole["stop_reason"], whole["usage"])
    return [{key: value for key, value in block.items() if key != "id"} for block in whole["content"]], stop_reason


def joined(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """Join a stream as Anthropic's client does; exactly one block is open from its start to its stop."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    fields = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    assert (events[0]["type"], events[-2]["type"], events[-1]["type"]) == (
        "message_start", "message_delta", "message_stop",
    )  # fmt: skip
    for event in events[1:-2]:
        kind = event["type"]
        assert event["index"] == len(blocks) - (kind != "content_block_start") and is_open == (
            kind != "content_block_start"
        )
        if kind == "content_block_start":
            blocks.append(dict(event["content_block"]))
            if blocks[-1]["type"] == "tool_use":
                assert blocks[-1]["input"] == {}
                blocks[-1]["input"] = ""
        elif kind == "content_block_delta":
            field = fields[event["delta"]["type"]]
            blocks[-1][{"partial_json": "input"}.get(field, field)] += event["delta"][field]
        is_open = kind != "content_block_stop"
    assert not is_open
    return blocks, events[-2]["delta"]["stop_reason"], events[-2]["usage"]


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def tool_block(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "name": name, "input": arguments}


async def test_optional_call_becomes_a_tool_use_block(gateway: Gateway) -> None:
    weather = tool_block("get_weather", city="Zürich")
    assert await ask(gateway, CALL) == ([weather], "tool_use")
    assert await ask(gateway, f"Let me see. {CALL}") == ([text_block("Let me see. "), weather], "tool_use")
    assert await ask(gateway, CALL * 2) == ([weather, weather], "tool_use")
    assert await ask(gateway, "No need.") == ([text_block("No need.")], "end_turn")
    assert await ask(gateway, "") == ([text_block("")], "end_turn")
    cut = CALL[: CALL.index("rich")]
    assert await ask(gateway, cut, FinishReason.LENGTH) == ([tool_block("get_weather")], "max_tokens")
    assert await ask(gateway, CALL, tool_choice={"type": "none"}) == ([text_block(CALL)], "end_turn")


async def test_forced_call_becomes_a_tool_use_block(gateway: Gateway) -> None:
    named = {"type": "tool", "name": "get_weather"}
    found = await ask(gateway, '{"city": "Rome"}', tool_choice=named)
    assert found == ([tool_block("get_weather", city="Rome")], "tool_use")
    grammar = gateway.engine.requests[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text) == SCHEMA
    listed = '[{"name": "clock", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]'
    found = await ask(gateway, listed, tool_choice={"type": "any"})
    assert found == ([tool_block("clock"), tool_block("get_weather", city="Rome")], "tool_use")
    one = parse(tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert json.loads(one.grammar.grammar.text)["maxItems"] == 1


async def test_reasoning_becomes_thinking_blocks_if_requested(gateway: Gateway) -> None:
    text = f"<think>\nHm, Zürich.\n</think>\n\nSo: {CALL}"
    reasoning = {"type": "thinking", "thinking": "Hm, Zürich.\n", "signature": ""}
    rest = [text_block("So: "), tool_block("get_weather", city="Zürich")]
    assert await ask(gateway, text, thinking=THINKING) == ([reasoning, *rest], "tool_use")
    assert await ask(gateway, text) == (rest, "tool_use")
    without = await ask(gateway, text, thinking={"type": "disabled"}, tools=None)
    assert without == ([text_block(f"So: {CALL}")], "end_turn")
    plain = await ask(gateway, "<think>a</think>b", thinking={"type": "adaptive"}, tools=[])
    assert plain == ([{"type": "thinking", "thinking": "a", "signature": ""}, text_block("b")], "end_turn")


async def test_thinking_without_reasoning_parser_is_refused(start_gateway: Any, roomy_model_dir: Path) -> None:
    gateway = await start_gateway(model=roomy_model_dir)
    async with gateway.session.post(URL, json={**HI, "thinking": THINKING}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "thinking") and "reasoning parser" in error["message"]


async def test_adaptive_thinking_without_parser_is_disabled(start_gateway: Any, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "roomy", max_model_len=4096)
    (model / "chat_template.jinja").write_text("{{ enable_thinking }}")
    for parser, expected in (("none", "False"), ("qwen3", "True")):
        gateway = await start_gateway(model=model, reasoning_parser=parser)
        assert await ask(gateway, "Hm.", thinking={"type": "adaptive"}) == ([text_block("Hm.")], "end_turn")
        encoder = gateway.service.require_model().encoder
        assert encoder.decode(gateway.engine.requests[-1].prompt_token_ids) == expected
        async with gateway.session.post(
            f"{URL}/count_tokens", json={**HI, "thinking": {"type": "adaptive"}}
        ) as response:
            counted = (await response.json())["input_tokens"]
        assert counted == len(gateway.engine.requests[-1].prompt_token_ids)


async def test_reasoning_may_be_omitted(gateway: Gateway) -> None:
    omitted = {"type": "adaptive", "display": "omitted"}
    assert await ask(gateway, "<think>a</think>b", thinking=omitted) == ([text_block("b")], "end_turn")


FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize("fields", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}])
async def test_output_schema_is_enforced(gateway: Gateway, fields: dict[str, Any]) -> None:
    found = await ask(gateway, '{"city": "Rome"}', tools=None, thinking={"type": "adaptive"}, **fields)
    assert found == ([text_block('{"city": "Rome"}')], "end_turn")
    grammar = gateway.engine.requests[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text) == SCHEMA
    assert parse(tools=None, output_config={"effort": "low"}).template["template_kwargs"]["reasoning_effort"] == "low"


async def test_schema_with_tools_allows_answer_and_calls(gateway: Gateway) -> None:
    fields: dict[str, Any] = {"output_config": {"format": FORMAT}}
    assert await ask(gateway, '{"city": "Rome"}', **fields) == ([text_block('{"city": "Rome"}')], "end_turn")
    assert gateway.engine.requests[-1].sampling.grammar is not None
    assert await ask(gateway, CALL, **fields) == ([tool_block("get_weather", city="Zürich")], "tool_use")


TOOL_USE = {"type": "tool_use", "id": "t1", "name": "clock", "input": {}}
CALLED: dict[str, Any] = {"role": "assistant", "content": [TOOL_USE]}


def answered(*ids: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id} for call_id in ids]}


@pytest.mark.parametrize(
    "messages",
    [
        [CALLED, answered("t1")],
        [CALLED, {"role": "system", "content": "x"}, answered("t1")],
        [CALLED, {"role": "assistant", "content": "Wait."}, answered("t1")],
        [{"role": "assistant", "content": [*CALLED["content"], {**CALLED["content"][0], "id": "t2"}]},
         answered("t2"), answered("t1")],
        [CALLED, answered("t1"), CALLED, answered("t1")],
    ],
)  # fmt: skip
def test_tool_results_answer_the_calls_of_the_previous_turn(messages: list[Any]) -> None:
    assert parse(messages=[*HI["messages"], *messages]).prompts


async def test_earlier_calls_and_results_reach_the_model(gateway: Gateway) -> None:
    used = {"type": "tool_use", "id": "toolu_0123abcde", "name": "get_weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": [{"type": "text", "text": "sunny"}]}
    again = {**used, "id": "toolu_again"}
    failed = {"type": "tool_result", "tool_use_id": again["id"], "content": "no net", "is_error": True}
    thought = {"type": "thinking", "thinking": "Hm", "signature": "x"}
    messages = [
        *HI["messages"],
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, used, again]},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "And?"}]},
    ]
    request = parse(messages=messages)
    (chat,) = request.prompts
    function = {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert list(chat[1:]) == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "0123abcde", "type": "function", "function": function},
                {"id": "again", "type": "function", "function": function},
            ],
            "reasoning": "Hm",
            "reasoning_content": "Hm",
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "0123abcde"},
        {"role": "tool", "content": "Error: no net", "tool_call_id": "again"},
        {"role": "user", "content": "And?"},
    ]
    assert [tool["function"]["name"] for tool in request.template["tools"]] == ["get_weather", "clock"]
    body = {"model": "roomy", "messages": messages, "tools": HI["tools"]}
    async with gateway.session.post(f"{URL}/count_tokens", json=body) as response:
        counted = (await response.json())["input_tokens"]
    assert (await ask(gateway, "x", messages=messages))[1] == "end_turn"
    assert len(gateway.engine.requests[-1].prompt_token_ids) == counted


def parse(**fields: Any) -> Any:
    return parse_messages(decode_body(json.dumps({**HI, **fields}).encode()))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": 7}}], "tool_choice": {"type": "tool", "name": "a"}},
         "tools[0].input_schema"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": THINKING, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": THINKING, "messages": [*HI["messages"], {"role": "assistant", "content": "It"}]}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [answered("t1")]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [CALLED, answered("t2")]}, "messages[1].content[0].tool_use_id"),
        ({"messages": [CALLED, answered("t1", "t1")]}, "messages[1].content[1].tool_use_id"),
        ({"messages": [CALLED, answered("t1"), {"role": "assistant", "content": "x"}, answered("t1")]},
         "messages[3].content[0].tool_use_id"),
        ({"messages": [CALLED, *HI["messages"]]}, "messages[0].content[0]"),
        ({"messages": [CALLED, *HI["messages"], {"role": "assistant", "content": "x"}]}, "messages[0].content[0]"),
        ({"tools": None, "output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}},
         "output_config.format.schema"),
        ({"tools": None, "output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_format.schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "regex", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"effort": "most"}}, "output_config.effort"),
        ({"tools": None, "output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format"),
        ({"tools": None, "output_config": {"format": FORMAT},
          "messages": [*HI["messages"], {"role": "assistant", "content": "{"}]}, "output_config.format"),
        ({"tools": None, "output_config": {"format": FORMAT}, "thinking": THINKING}, "thinking"),
    ],
)  # fmt: skip
async def test_invalid_tool_use_is_named_in_anthropics_format(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    async with gateway.session.post(URL, json={**HI, **fields}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param) and param in error["message"]
