"""Reasoning of earlier answers, effort and verbosity reach the chat template, which decides what to render."""

import json
from typing import Any

import pytest

from gateway.apis.anthropic.schema import parse_messages
from gateway.apis.chat.schema import parse_chat
from gateway.apis.responses.schema import parse_response
from gateway.http.json_body import decode_body
from gateway.pipeline.request import CompletionRequest
from gateway.text.chat_template import ChatTemplate

# Like Qwen3's template: only reasoning after the last user message is rendered.
TEMPLATE = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- m.role -}}:
{%- if m.reasoning_content is defined and loop.index0 > ns.last -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}[{{ call.function.name }}]{%- endfor -%};
{%- endfor -%}
{{- reasoning_effort is defined and reasoning_effort }}{{ verbosity is defined and verbosity -}}
{{- tools is defined and '' -}}"""


def rendered(request: CompletionRequest) -> str:
    options: dict[str, Any] = dict(request.template)
    (messages,) = request.prompts
    assert isinstance(messages, tuple)
    return ChatTemplate(TEMPLATE, {}).render(messages, **options)


def body(**fields: Any) -> Any:
    return decode_body(json.dumps(fields).encode())


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "ok"}


def chat(key: str) -> CompletionRequest:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", key: "OLD"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": None, key: "R", "tool_calls": [CALL]},
        TOOL,
    ]
    return parse_chat(body(messages=messages, reasoning_effort="low", verbosity="high"))


def message() -> CompletionRequest:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "OLD"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "R"},
                {"type": "tool_use", "id": "toolu_c1", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_c1", "content": "ok"}]},
    ]
    return parse_messages(body(model="m", max_tokens=1, messages=messages, output_config={"effort": "low"}))


def response() -> CompletionRequest:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "OLD"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    ]
    return parse_response(body(input=items, reasoning={"effort": "low"}, text={"verbosity": "high"}))


@pytest.mark.parametrize(
    ("request_", "verbosity"),
    [(chat("reasoning"), "high"), (chat("reasoning_content"), "high"), (message(), "False"), (response(), "high")],
    ids=["chat", "chat, older key", "message", "response"],
)
def test_reasoning_after_the_last_user_message_is_rendered(request_: CompletionRequest, verbosity: str) -> None:
    expected = f"user:a;assistant:b;user:c;assistant:<think>R</think>[f];tool:ok;low{verbosity}"
    assert rendered(request_) == expected


def test_effort_none_disables_thinking() -> None:
    request = parse_chat(body(messages=[{"role": "user", "content": "a"}], reasoning_effort="none"))
    assert request.template["template_kwargs"] == {"reasoning_effort": "none", "enable_thinking": False}
