"""What a response says again of the request that it answers. Pure.

Every field is there in every response, whether or not the request had it, with the value that held: typed clients
refuse a response that lacks one. Only what this server has read is repeated, not what else a client wrote beside it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.requests.generation_fields import SamplingFields
from gateway.requests.responses_body import ResponsesBody, TextFields
from gateway.requests.responses_tools import ChosenTool, ResponseTool, ResponseToolChoice
from shared.messages import SamplingParams

_FORMAT_NAME = "response"  # of a schema whose request did not name it: OpenAI's clients read one


def repeated(fields: ResponsesBody) -> dict[str, Any]:
    effort, summary = (fields.reasoning.effort, fields.reasoning.summary) if fields.reasoning else (None, None)
    return {
        "background": bool(fields.background),
        "frequency_penalty": fields.frequency_penalty or 0.0,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": fields.presence_penalty or 0.0,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": _text(fields.text),
        "tool_choice": _tool_choice(fields.tool_choice),
        "tools": [_tool(tool) for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def with_what_held(said: Mapping[str, Any], fields: SamplingFields, sampling: SamplingParams) -> dict[str, Any]:
    """`said`: of repeated(), or nothing. What the request left open is as the engine was told: a model has defaults."""
    named = {name: getattr(fields, name) for name in ("temperature", "top_p") if name in said}
    return {**said, **{name: getattr(sampling, name) if value is None else value for name, value in named.items()}}


def _tool(tool: ResponseTool) -> dict[str, Any]:
    """`strict` is null where the request leaves it open: arguments follow the schema where a call is forced."""
    return msgspec.to_builtins(tool)  # type: ignore[no-any-return]


def _tool_choice(choice: ResponseToolChoice | None) -> str | dict[str, Any]:
    if not isinstance(choice, ChosenTool):
        return choice or "auto"
    if choice.type == "function":
        return {"type": choice.type, "name": choice.name}
    tools = [{"type": tool.type, "name": tool.name} for tool in choice.tools or ()]
    return {"type": choice.type, "mode": choice.mode or "auto", "tools": tools}


def _text(text: TextFields | None) -> dict[str, Any]:
    """Null is left out: OpenAI's schema has none here but for `strict`."""
    if text is None or text.format is None:
        shown: dict[str, Any] = {"type": "text"}
    else:
        given = msgspec.to_builtins(text.format)
        known = given if given["type"] == "json_schema" else {"type": given["type"]}
        shown = {name: value for name, value in known.items() if value is not None}
    if shown["type"] == "json_schema":
        shown = {"name": _FORMAT_NAME, "strict": None, **shown}
    verbosity = {} if text is None or text.verbosity is None else {"verbosity": text.verbosity}
    return {"format": shown, **verbosity}
