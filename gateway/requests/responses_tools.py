"""Tools of the Responses API -> those of a chat. Pure.

Functions alone: tools that a server runs itself (web search, code, computers, MCP) are refused by name.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from gateway.requests.grammar_fields import MAX_TOOLS, FunctionFields, NamedFunction, NamedTool, ToolChoice, ToolFields


class ResponseTool(msgspec.Struct, kw_only=True):
    type: str
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None


class ChosenTool(msgspec.Struct, kw_only=True):
    """{"type": "function", "name"}, or {"type": "allowed_tools", "mode", "tools"}"""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


ResponseTools: TypeAlias = Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)]
ResponseToolChoice: TypeAlias = Literal["none", "auto", "required"] | ChosenTool


def chat_tools(
    tools: list[ResponseTool] | None, choice: ResponseToolChoice | None
) -> tuple[list[ToolFields] | None, ToolChoice | None]:
    """Raises InvalidRequest."""
    functions = None if tools is None else [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if not isinstance(choice, ChosenTool):
        return functions, choice
    if choice.type == "function":
        if choice.name is None:
            raise MissingParameter("Missing required parameter: tool_choice.name.", param="tool_choice.name")
        return functions, NamedTool(function=NamedFunction(choice.name))
    if choice.type == "allowed_tools":
        return _allowed(functions or [], choice), choice.mode or "auto"
    raise UnsupportedParameter(
        f"tool_choice.type: {choice.type[:100]!r} is not supported by this server; expected 'function' or "
        "'allowed_tools'.",
        param="tool_choice.type",
    )


def _function(tool: ResponseTool, path: str) -> ToolFields:
    if tool.type != "function":
        raise UnsupportedParameter(
            f"{path}.type: {tool.type[:100]!r} is not supported by this server; it has tools of type 'function' only.",
            param=f"{path}.type",
        )
    if tool.name is None:
        raise MissingParameter(f"Missing required parameter: {path}.name.", param=f"{path}.name")
    function = FunctionFields(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolFields(type="function", function=function)


def _allowed(functions: list[ToolFields], choice: ChosenTool) -> list[ToolFields]:
    names = [tool.name for tool in choice.tools or ()]
    by_name = {function.function.name: function for function in functions}
    for index, name in enumerate(names):
        if name not in by_name:
            param = f"tool_choice.tools[{index}].name"
            raise InvalidRequest(f"{param}: {str(name)[:128]!r} is none of the tools.", param=param)
    return [function for name, function in by_name.items() if name in names]
