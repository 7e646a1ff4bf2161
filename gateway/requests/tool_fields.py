"""tools, tool_choice and the tool messages of a chat: checked, and turned into what the rest works on. Pure.

    auto        the model calls or answers, as its chat template has taught it; a parser of its family reads it. Where
                the answer has to have a form, a grammar of both leaves the choice (call_grammar.py)
    required    at least one call, by a grammar: a list of {"name", "arguments"}, on any model
    a function  that one call, by a grammar: its arguments alone, on any model
    allowed_tools   auto or required, as if there were no other tools
    none        as if there were no tools

Does not know how a family of models writes its calls (gateway/parsing does).

A call by a grammar is an object {"name", "arguments"}, the arguments by the function's schema.

A chat's way in, where its body is checked: the schemas of all four APIs make these of their own tools.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest
from gateway.requests.grammar_fields import AskedGrammar, check_beside_grammar
from gateway.requests.request_body import decode_object
from shared.grammars import json_schema_grammar

Schema: TypeAlias = Mapping[str, Any]
ANY_OBJECT: Schema = {"type": "object"}


def call_schema(functions: Mapping[str, Schema], arguments: str = "arguments") -> dict[str, Any]:
    """Of one call. `functions`: names with the schemas of their arguments; `arguments`: the key of these."""
    return {"anyOf": _calls(functions, arguments), "$defs": _definitions(functions)}


def calls_schema(functions: Mapping[str, Schema], *, is_parallel: bool, arguments: str = "arguments") -> dict[str, Any]:
    """Of a list of calls, at least one."""
    most = {} if is_parallel else {"maxItems": 1}
    items = {"anyOf": _calls(functions, arguments)}
    return {"type": "array", "minItems": 1, "items": items, "$defs": _definitions(functions), **most}


def _calls(functions: Mapping[str, Schema], arguments: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: {"$ref": f"#/$defs/{index}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for index, name in enumerate(functions)
    ]


def _definitions(functions: Mapping[str, Schema]) -> dict[str, Any]:
    """Each function's parameters are a definition, within which its own $refs point."""
    return {str(index): _moved(schema, f"#/$defs/{index}") for index, schema in enumerate(functions.values())}


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


MAX_TOOLS = 128  # OpenAI's limit

FunctionName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionFields(msgspec.Struct, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionFields


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedSubset(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedSubset


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCallFields(msgspec.Struct, kw_only=True):
    """A call of an earlier answer, as it was answered."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


Tools: TypeAlias = Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)]
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedTools


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`name` is set if one function is to be called. `definitions` are JSON values, as chat templates take them."""

    definitions: tuple[dict[str, Any], ...]
    mode: Literal["auto", "required", "named"]
    name: str = ""
    grammar: AskedGrammar | None = None  # of calls that must be
    functions: Mapping[str, Schema] = field(default_factory=dict)  # what binds the arguments of calls that may be
    is_parallel: bool = True  # several calls in one answer


def tool_use(fields: Any) -> ToolUse | None:
    """`fields`: those of a chat, whose types are checked."""
    tools, choice = fields.tools or [], fields.tool_choice
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice: only allowed when tools are given.", param="tool_choice")
        return None
    _check_names(tools)
    if isinstance(choice, AllowedTools):
        tools, choice = _allowed(tools, choice.allowed_tools), choice.allowed_tools.mode
    if choice == "none":
        return None
    definitions = tuple(_definition(tool) for tool in tools)
    is_parallel = fields.parallel_tool_calls is not False
    if choice is None or choice == "auto":
        functions = {tool.function.name: _parameters(tool) if tool.function.strict else ANY_OBJECT for tool in tools}
        return ToolUse(definitions, "auto", functions=functions, is_parallel=is_parallel)
    check_beside_grammar(fields, "tool_choice")
    if choice == "required":
        calls = calls_schema({tool.function.name: _parameters(tool) for tool in tools}, is_parallel=is_parallel)
        return ToolUse(definitions, "required", grammar=AskedGrammar(json_schema_grammar(calls), "tools"))
    return _named(tools, definitions, choice.function.name)


def rendered_calls(calls: list[ToolCallFields], path: str) -> list[dict[str, Any]]:
    """As chat templates take them: the arguments as JSON values."""
    rendered = []
    for index, call in enumerate(calls):
        param = f"{path}[{index}].function.arguments"
        arguments = decode_object(call.function.arguments or "{}", param)
        function = {"name": call.function.name, "arguments": arguments}
        rendered.append({"id": call.id, "type": "function", "function": function})
    return rendered


def _named(tools: list[ToolFields], definitions: tuple[dict[str, Any], ...], name: str) -> ToolUse:
    for index, tool in enumerate(tools):
        if tool.function.name == name:
            schema = json_schema_grammar(_parameters(tool))
            return ToolUse(definitions, "named", name, AskedGrammar(schema, f"tools[{index}].function.parameters"))
    names = ", ".join(tool.function.name for tool in tools[:10])
    raise InvalidRequest(
        f"tool_choice.function.name: {name[:128]!r} is none of the tools; they are {names}.",
        param="tool_choice.function.name",
    )


def _allowed(tools: list[ToolFields], subset: AllowedSubset) -> list[ToolFields]:
    known = {tool.function.name for tool in tools}
    for index, tool in enumerate(subset.tools):
        if tool.function.name not in known:
            param = f"tool_choice.allowed_tools.tools[{index}].function.name"
            raise InvalidRequest(f"{param}: {tool.function.name[:128]!r} is none of the tools.", param=param)
    names = {tool.function.name for tool in subset.tools}
    return [tool for tool in tools if tool.function.name in names]


def _check_names(tools: list[ToolFields]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            param = f"tools[{index}].function.name"
            raise InvalidRequest(f"{param}: {tool.function.name!r} is given more than once.", param=param)
        seen.add(tool.function.name)


def _definition(tool: ToolFields) -> dict[str, Any]:
    """Without what is null or absent: templates print what they find."""
    function = {"name": tool.function.name, "description": tool.function.description, "parameters": _parameters(tool)}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _parameters(tool: ToolFields) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}
