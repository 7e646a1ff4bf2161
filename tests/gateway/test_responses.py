"""/v1/responses with a scripted engine: items, order of events, the request to the engine, and repeated fields."""

import json
import time
from typing import Any

import openai
import pydantic
import pytest

from gateway.text.served_model import ServedModel
from shared.messages import ErrorCode, ErrorEvent, FinishReason, GrammarKind, TokenEvent
from tests.gateway.conftest import Gateway
from tests.gateway.responses import URL, WEATHER, asked, model_says, streamed, tokens_of
from tests.gateway.test_compaction import prompt_of
from tests.gateway.text.test_logprobs import says_scored
from tests.tiny_model import write_tiny_model

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MESSAGE_EVENTS = [
    "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"
]  # fmt: skip


@pytest.fixture(scope="module")
def roomy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write a model with a long context: tool definitions are long if every character is a token."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "roomy", max_model_len=4096)


def names_without_deltas(events: list[Any]) -> list[str]:
    names = [event.type.removeprefix("response.") for event in events]
    return [name for name in names if not name.endswith(".delta")]


async def test_text_response_whole_equals_stream(gateway: Gateway) -> None:
    num_tokens = model_says(gateway, "It is é, and more\u2028.")
    whole = await asked(gateway.session)
    events = await streamed(gateway.session)
    assert names_without_deltas(events) == ["created", "in_progress", *MESSAGE_EVENTS, "completed"]
    assert "".join(event.delta for event in events if event.type.endswith(".delta")) == whole.output_text
    assert whole.output_text == "It is é, and more\u2028." and whole.status == "completed"
    last = events[-1].response
    assert [item.model_dump(exclude={"id"}) for item in last.output] == [
        item.model_dump(exclude={"id"}) for item in whole.output
    ]
    assert last.usage == whole.usage and last.usage is not None
    num_prompt_tokens = len(gateway.engine.requests[0].prompt_token_ids)
    assert (last.usage.input_tokens, last.usage.output_tokens) == (num_prompt_tokens, num_tokens)
    assert {event.response.id for event in (events[0], events[1], events[-1])} == {last.id}
    assert last.id.startswith("resp_")


async def test_truncated_answer_is_incomplete(gateway: Gateway) -> None:
    model_says(gateway, "It is", reason=FinishReason.LENGTH)
    for response in (await asked(gateway.session), (await streamed(gateway.session))[-1].response):
        details, (message,) = response.incomplete_details, list[Any](response.output)
        assert details is not None and (response.status, details.reason) == ("incomplete", "max_output_tokens")
        assert message.status == "incomplete" and response.output_text == "It is"
    assert (await streamed(gateway.session))[-1].type == "response.incomplete"


async def test_answer_without_text_is_an_empty_message(gateway: Gateway) -> None:
    model_says(gateway, "")
    whole = await asked(gateway.session)
    assert [item.type for item in whole.output] == ["message"] and whole.output_text == ""
    assert names_without_deltas(await streamed(gateway.session))[2:-1] == MESSAGE_EVENTS


async def test_reasoning_text_and_calls_are_items_in_order(start_gateway: Any, roomy_model_dir: Any) -> None:
    gateway = await start_gateway(model=roomy_model_dir, reasoning_parser="qwen3")
    model_says(gateway, f"<think>hm</think>I look.\n{CALL}\n{CALL}")
    whole = await asked(gateway.session, tools=[WEATHER])
    events = await streamed(gateway.session, tools=[WEATHER])
    assert whole.usage is not None and whole.usage == events[-1].response.usage
    assert whole.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")  # one token per character
    for output in (whole.output, events[-1].response.output):
        reasoning, message, *calls = list[Any](output)
        assert reasoning.content[0].text == "hm" and message.content[0].text.strip() == "I look."
        assert [(call.type, call.name, call.arguments) for call in calls] == [
            ("function_call", "get_weather", '{"city": "Rome"}')
        ] * 2
        assert len({item.id for item in output} | {call.call_id for call in calls}) == 6
    call_events = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    reasoning_events = [name.replace("output_text", "reasoning_text") for name in MESSAGE_EVENTS]
    assert names_without_deltas(events) == [
        "created", "in_progress", *reasoning_events, *MESSAGE_EVENTS, *call_events, *call_events, "completed"
    ]  # fmt: skip
    for index, item in enumerate(events[-1].response.output):
        of_item = [event for event in events if getattr(event, "output_index", None) == index]
        assert {event.item_id for event in of_item if hasattr(event, "item_id")} == {item.id}
        done = next(event for event in of_item if event.type == "response.output_item.done")
        assert done.item == item
        text = getattr(item, "arguments", None) or item.content[0].text
        assert "".join(event.delta for event in of_item if event.type.endswith(".delta")) == text


async def test_text_after_a_call_is_a_second_message(start_gateway: Any, roomy_model_dir: Any) -> None:
    gateway = await start_gateway(model=roomy_model_dir)
    model_says(gateway, f"One.{CALL}Two.")
    whole = await asked(gateway.session, tools=[WEATHER])
    assert [item.type for item in whole.output] == ["message", "function_call", "message"]
    last = (await streamed(gateway.session, tools=[WEATHER]))[-1].response
    assert [item.type for item in last.output] == ["message", "function_call", "message"]
    assert whole.output_text == last.output_text == "One.Two."


async def test_logprobs_are_requested_with_include(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says_scored(tokens_of(tiny_model, "It is é."), group=2)
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await asked(gateway.session, **body)
    events = await streamed(gateway.session, **body)
    message: Any = whole.output[0]
    scores = message.content[0].logprobs
    assert scores and bytes(byte for entry in scores for byte in entry.bytes).decode() == "It is é."
    assert all(len(entry.top_logprobs) == 2 for entry in scores)
    delta_entries = [entry for event in events if event.type.endswith(".delta") for entry in event.logprobs]
    assert [(entry.token, entry.logprob) for entry in delta_entries] == [
        (entry.token, entry.logprob) for entry in scores
    ]
    assert events[-1].response.output[0].content[0].logprobs == scores
    assert whole.top_logprobs == 2
    assert gateway.engine.requests[0].sampling.logprobs == 2
    model_says(gateway, "It")
    await asked(gateway.session)
    assert gateway.engine.requests[-1].sampling.logprobs is None


async def test_response_fields_reach_the_engine(gateway: Gateway, tiny_model: ServedModel) -> None:
    model_says(gateway, "ok")
    items = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "you"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "It is", "annotations": []}]},
        {"type": "message", "role": "user", "content": "?"},
    ]  # fmt: skip
    await asked(gateway.session, input=items, instructions="sys", temperature=0.5, top_p=0.9, top_k=3,
                max_output_tokens=7, seed=5)  # fmt: skip
    request = gateway.engine.requests[0]
    turns = ["system\nsys", "system\nbe", "user\nhi\nyou", "assistant\nIt is", "user\n?"]
    prompt = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    assert request.prompt_token_ids == tiny_model.encoder.encode_text(prompt)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 3, 5)
    assert sampling.max_tokens == 7


async def test_calls_and_outputs_become_messages(start_gateway: Any, roomy_model_dir: Any) -> None:
    gateway = await start_gateway(model=roomy_model_dir)
    model_says(gateway, "ok")
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
    items = [
        {"role": "user", "content": "Rome, and Oslo?"},
        {"role": "assistant", "content": "I look."},
        call,
        {**call, "call_id": "c2", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    await asked(gateway.session, input=items)
    decoded = gateway.service.require_model().encoder.decode(gateway.engine.requests[0].prompt_token_ids)
    assert decoded.count("assistant\n") == 2  # both calls in one message, with its text
    assert decoded.index("I look.") < decoded.index('Rome"}') < decoded.index('Oslo"}') < decoded.index("sunny")
    assert "rain" in decoded


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"type": "json_object"}, GrammarKind.JSON_SCHEMA),
        ({"type": "json_schema", "name": "t", "schema": {"type": "integer"}, "strict": True}, GrammarKind.JSON_SCHEMA),
        ({"type": "text"}, None),
    ],
)
async def test_text_format_becomes_a_grammar(gateway: Gateway, form: Any, kind: GrammarKind | None) -> None:
    model_says(gateway, "7")
    response = await asked(gateway.session, text={"format": form})
    grammar = gateway.engine.requests[0].sampling.grammar
    assert (grammar and grammar.kind) == kind
    assert response.text is not None and response.text.format is not None and response.text.format.type == form["type"]


@pytest.mark.parametrize(
    ("choice", "text", "names"),
    [
        ({"type": "function", "name": "get_weather"}, '{"city": "Rome"}', ["get_weather"]),
        ("required", '[{"name": "get_weather", "arguments": {"city": "Rome"}}]', ["get_weather"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
         '[{"name": "get_weather", "arguments": {"city": "Rome"}}]', ["get_weather"]),
        ("none", '{"city": "Rome"}', []),
    ],
)  # fmt: skip
async def test_tool_choice_becomes_a_grammar(
    start_gateway: Any, roomy_model_dir: Any, choice: Any, text: str, names: list[str]
) -> None:
    gateway = await start_gateway(model=roomy_model_dir)
    model_says(gateway, text)
    other = {"type": "function", "name": "clock", "parameters": None, "strict": None}
    response = await asked(gateway.session, tools=[WEATHER, other], tool_choice=choice)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [call.name for call in calls] == names
    grammar = gateway.engine.requests[0].sampling.grammar
    assert (grammar is not None) is bool(names)
    if grammar is not None and isinstance(choice, dict) and choice["type"] == "allowed_tools":
        assert "clock" not in grammar.text


async def test_request_fields_are_repeated_in_the_response(gateway: Gateway) -> None:
    model_says(gateway, "ok")
    asked_for: dict[str, Any] = {
        "instructions": "sys", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "temperature": 0.5,
        "top_p": 0.25, "max_output_tokens": 9, "parallel_tool_calls": False, "tool_choice": "none",
        "truncation": "disabled", "prompt_cache_key": "k", "max_tool_calls": 2, "model": "tiny", "tools": [WEATHER],
    }  # fmt: skip
    reasoning = {"effort": "low", "summary": "detailed"}
    response = await asked(gateway.session, **asked_for, reasoning=reasoning, store=False)
    body_read = response.model_dump()
    assert {name: body_read[name] for name in asked_for if name != "tools"} == {
        name: value for name, value in asked_for.items() if name != "tools"
    }
    assert body_read["tools"][0]["name"] == "get_weather" and response.reasoning is not None
    assert response.reasoning.effort == "low"


async def test_every_response_has_the_fields_that_typed_clients_need(start_gateway: Any, roomy_model_dir: Any) -> None:
    """Follow OpenAI's document and the Open Responses specification, for any optional field of the request."""
    gateway = await start_gateway(model=roomy_model_dir)
    model_says(gateway, "ok")
    tool = {"type": "function", "name": "f", "defer_loading": False, "x": 1}
    body: dict[str, Any] = {
        "input": "hi", "tools": [tool],
        "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "text", "name": "n"}, "x": 2}, "presence_penalty": 0.5,
    }  # fmt: skip
    async with gateway.session.post("/v1/responses", json=body) as reply:
        body_read = await reply.json()
    assert body_read["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    ]
    assert body_read["tool_choice"] == {"type": "allowed_tools", "mode": "auto", "tools": body["tool_choice"]["tools"]}
    assert body_read["text"] == {"format": {"type": "text"}}
    assert (body_read["store"], body_read["presence_penalty"], body_read["frequency_penalty"]) == (True, 0.5, 0.0)
    assert body_read["created_at"] <= body_read["completed_at"] <= time.time()
    schema = {"type": "json_schema", "schema": {"type": "integer"}}
    async with gateway.session.post("/v1/responses", json={"input": "hi", "text": {"format": schema}}) as reply:
        assert (await reply.json())["text"] == {"format": {"name": "response", "strict": None, **schema}}


async def test_error_within_a_stream_is_a_failed_response(gateway: Gateway) -> None:
    def breaks(request: Any) -> Any:
        yield TokenEvent(request.request_id, 0, [70])
        yield ErrorEvent(request.request_id, ErrorCode.REQUEST_FAILED, "")

    gateway.engine.script = breaks
    last = (await streamed(gateway.session))[-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    async with gateway.session.post("/v1/responses", json={"input": "hi"}) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (500, "request_failed")


async def test_stream_sends_its_id_before_the_first_token(gateway: Gateway) -> None:
    async with gateway.session.post("/v1/responses", json={"input": "hi", "stream": True}) as reply:
        source = await gateway.engine.next_stream()
        while not (line := await reply.content.readline()).startswith(b"data: "):
            pass
        assert source.request.request_id.encode() in line and b'"response.created"' in line


class Town(pydantic.BaseModel):
    name: str


async def test_openai_stream_helpers_read_a_response(start_gateway: Any, roomy_model_dir: Any) -> None:
    gateway = await start_gateway(model=roomy_model_dir, reasoning_parser="qwen3")
    url = f"http://127.0.0.1:{gateway.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        model_says(gateway, f"<think>hm</think>I look.{CALL}")
        tools: Any = [WEATHER]
        async with client.responses.stream(model="roomy", input="hi", tools=tools) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output_text == "I look." and final.output[2].parsed_arguments == {"city": "Rome"}  # type: ignore[union-attr]
        snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
        assert snapshots[-1] == "I look."
        model_says(gateway, '{"name": "Rome"}')
        parsed = await client.responses.parse(model="roomy", input="hi", text_format=Town)
        assert parsed.output_parsed == Town(name="Rome")
        grammar = gateway.engine.requests[-1].sampling.grammar
        assert grammar is not None and json.loads(grammar.text)["required"] == ["name"]


# Tools of Codex 0.169.0: functions, a namespace, and a hosted tool.
CODEX_TOOLS = [
    {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}},
    {"type": "namespace", "name": "multi_agent_v1", "tools": [{"type": "function", "name": "f"}]},
    {"type": "web_search", "external_web_access": False},
]


async def test_function_in_a_namespace_is_called_by_its_bare_name(start_gateway: Any, roomy_model_dir: Any) -> None:
    gateway = await start_gateway(model=roomy_model_dir)
    call = '[{"name": "multi_agent_v1__f", "arguments": {}}]'
    model_says(gateway, call)
    body = {"input": "hi", "tools": CODEX_TOOLS, "tool_choice": "required"}
    async with gateway.session.post(URL, json=body) as reply:
        answered = await reply.json()
        assert (reply.status, reply.headers.get("x-pagestream-ignored")) == (200, "tools[2]"), answered
    (item,) = answered["output"]
    assert (item["name"], item["namespace"], item["arguments"]) == ("f", "multi_agent_v1", "{}")
    assert answered["tools"][1:] == CODEX_TOOLS[1:]
    grammar = gateway.engine.requests[-1].sampling.grammar
    assert grammar is not None and "multi_agent_v1__f" in grammar.text and "web_search" not in grammar.text
    model_says(gateway, call)
    async with gateway.session.post(URL, json={**body, "stream": True}) as reply:
        lines = (await reply.text()).splitlines()
    items = [json.loads(line[6:])["item"] for line in lines if line.startswith("data: ") and '"item":' in line]
    assert [(item["name"], item["namespace"]) for item in items] == [("f", "multi_agent_v1")] * 2
    model_says(gateway, "Done.")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
    turn = [{"role": "user", "content": "hi"}, item, output]
    assert (await asked(gateway.session, input=turn)).output_text == "Done."
    assert "multi_agent_v1__f" in prompt_of(gateway)


async def test_custom_tool_is_a_function_with_one_string(start_gateway: Any, roomy_model_dir: Any) -> None:
    gateway = await start_gateway(model=roomy_model_dir)
    model_says(gateway, '[{"name": "patch", "arguments": {"input": "x"}}]')
    body = {"input": "hi", "tools": [{"type": "custom", "name": "patch"}], "tool_choice": "required"}
    async with gateway.session.post(URL, json=body) as reply:
        (item,) = (await reply.json())["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "patch", {"input": "x"})
