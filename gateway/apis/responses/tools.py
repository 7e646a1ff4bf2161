"""Tools and tool choices of OpenAI's Responses API, converted to those of a chat. Pure.

function     a tool of the chat
custom       a function with one string, `input`
namespace    its functions, named NAMESPACE__NAME; calls are returned with the bare name and `namespace`
all others   hosted tools (web search, code, computers, MCP): left out, and reported in `x-pagestream-ignored`
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from gateway.http.json_body import typed_fields
from gateway.pipeline.grammar import (
    MAX_TOOLS,
    FunctionFields,
    FunctionName,
    NamedFunction,
    NamedTool,
    ToolChoice,
    ToolFields,
)

MAX_NAME_CHARS = 128  # of a function, as in a chat
_SEPARATOR = "__"  # as in vLLM
_CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class _TypedTool(msgspec.Struct, kw_only=True):
    type: str


class _Function(msgspec.Struct, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Custom(msgspec.Struct, kw_only=True):
    name: FunctionName
    description: str | None = None


class _Namespace(msgspec.Struct, kw_only=True):
    name: FunctionName
    tools: list[dict[str, Any]]


class ToolReference(msgspec.Struct, kw_only=True):
    """A tool that a choice names."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ChosenTool(ToolReference, kw_only=True):
    """Either {"type": "function", "name"} or {"type": "allowed_tools", "mode", "tools"}."""

    mode: Literal["auto", "required"] | None = None
    tools: list[ToolReference] | None = None


ResponseTools: TypeAlias = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
ResponseToolChoice: TypeAlias = Literal["none", "auto", "required"] | ChosenTool


class ChatTools(NamedTuple):
    """Tools of a chat."""

    functions: list[ToolFields] | None
    choice: ToolChoice | None
    paths: list[str]  # of each function in the request
    ignored: tuple[str, ...]  # paths of the tools that were left out


def chat_tools(tools: Sequence[Mapping[str, Any]] | None, choice: ResponseToolChoice | None) -> ChatTools:
    """Convert tools and tool_choice; raise InvalidRequest."""
    functions, hosted = dict[str, ToolFields](), list[str]()  # functions by their path
    for index, tool in enumerate(tools or ()):
        path = f"tools[{index}]"
        found = dict(_functions(tool, path))
        functions |= found
        if not found and tool["type"] != "namespace":
            hosted.append(path)
    _check(functions)
    chosen: ToolChoice | None
    if isinstance(choice, ChosenTool) and choice.type == "allowed_tools":
        functions, chosen = _allowed(functions, choice), choice.mode or "auto"
    else:
        chosen = _chosen(choice)
    if hosted and chosen == "required" and not functions:
        raise InvalidRequest("tool_choice: required, but the request has no function.", param="tool_choice")
    return ChatTools(None if tools is None else list(functions.values()), chosen, list(functions), tuple(hosted))


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function in the chat."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def namespaced_names(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return chat name -> (namespace, name) of the functions in namespaces of validated tools."""
    return {
        flat_name(function["name"], tool["name"]): (tool["name"], function["name"])
        for tool in tools
        if tool["type"] == "namespace"
        for function in tool["tools"]
    }


def shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools as a response repeats them; functions have exactly the fields that typed clients expect."""
    names = ("type", "name", "description", "parameters", "strict")
    return [{name: tool.get(name) for name in names} if tool["type"] == "function" else dict(tool) for tool in tools]


def _functions(tool: Mapping[str, Any], path: str, namespace: str | None = None) -> Iterator[tuple[str, ToolFields]]:
    kind = _typed(tool, _TypedTool, path).type
    if kind == "function":
        given = _typed(tool, _Function, path)
        yield path, _tool(given.name, given.description, given.parameters, given.strict, namespace, path)
    elif kind == "custom":
        custom = _typed(tool, _Custom, path)
        yield path, _tool(custom.name, custom.description, _CUSTOM_INPUT, None, namespace, path)
    elif kind == "namespace" and namespace is None:
        nested = _typed(tool, _Namespace, path)
        for index, inner in enumerate(nested.tools):
            inner_path = f"{path}.tools[{index}]"
            found = list(_functions(inner, inner_path, nested.name))
            if not found:
                raise UnsupportedParameter(
                    f"{inner_path}.type: {str(inner['type'])[:100]!r} is not supported in a namespace; expected "
                    "'function' or 'custom'.",
                    param=f"{inner_path}.type",
                )
            yield from found


def _tool(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
    namespace: str | None,
    path: str,
) -> ToolFields:
    flat = flat_name(name, namespace)
    if len(flat) > MAX_NAME_CHARS:
        raise InvalidRequest(
            f"{path}.name: {flat[:200]!r} has {len(flat)} characters with its namespace; at most {MAX_NAME_CHARS}.",
            param=f"{path}.name",
        )
    function = FunctionFields(name=flat, description=description, parameters=parameters, strict=strict)
    return ToolFields(type="function", function=function)


def _typed(tool: Mapping[str, Any], kind: type[Any], path: str) -> Any:
    try:
        return typed_fields(tool, kind)
    except InvalidRequest as error:
        param = f"{path}.{error.param}" if error.param else path
        message = error.message.replace(error.param, param, 1) if error.param else f"{path}: {error.message}"
        raise type(error)(message, param=param) from error


def _check(functions: Mapping[str, ToolFields]) -> None:
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools: {len(functions)} functions, those of namespaces included; at most {MAX_TOOLS}.", param="tools"
        )
    seen = set[str]()
    for path, tool in functions.items():
        name = tool.function.name
        if name in seen:
            raise InvalidRequest(f"{path}.name: {name!r} is given more than once.", param=f"{path}.name")
        seen.add(name)


def _chosen(choice: ResponseToolChoice | None) -> ToolChoice | None:
    if not isinstance(choice, ChosenTool):
        return choice
    if choice.type in ("function", "custom"):
        if choice.name is None:
            raise MissingParameter("Missing required parameter: tool_choice.name.", param="tool_choice.name")
        return NamedTool(function=NamedFunction(flat_name(choice.name, choice.namespace)))
    raise UnsupportedParameter(
        f"tool_choice.type: {choice.type[:100]!r} is not supported; expected 'function', 'custom' or 'allowed_tools'.",
        param="tool_choice.type",
    )


def _allowed(functions: Mapping[str, ToolFields], choice: ChosenTool) -> dict[str, ToolFields]:
    known = {tool.function.name for tool in functions.values()}
    names = [flat_name(tool.name or "", tool.namespace) for tool in choice.tools or ()]
    for index, name in enumerate(names):
        if name not in known:
            param = f"tool_choice.tools[{index}].name"
            raise InvalidRequest(f"{param}: {name[:128]!r} is not one of the tools.", param=param)
    return {path: tool for path, tool in functions.items() if tool.function.name in names}
