"""Fields that constrain the answer: its format (a Grammar) and the tools that it may or must call. Pure.

    response_format                                   OpenAI: text, json_object, json_schema
    structured_outputs {json, regex, choice, ...}     vLLM
    guided_json, guided_regex, guided_choice, ...     vLLM, before structured_outputs
    regex, ebnf, json_schema                          SGLang
    grammar, json_schema                              llama.cpp; an empty text means none

Only one of them may be set. Schemas are always enforced, whatever `strict` says; a schema with keywords that cannot be
enforced is refused. shared/grammars.py checks the grammars themselves.

    tool_choice: auto   the model calls or answers; a parser of its family reads the calls. With a response format, a
                        grammar allows either (call_grammar.py)
    required            at least one call, by a grammar: a list of {"name", "arguments"}, on any model
    a function          one call of it, by a grammar: its arguments only, on any model
    allowed_tools       auto or required, restricted to these tools
    none                as if no tools were given
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest, MissingParameter
from gateway.http.json_body import decode_object
from shared.grammars import json_schema_grammar
from shared.messages import Grammar, GrammarKind

Schema: TypeAlias = dict[str, Any] | str  # a JSON object or its text
Choices: TypeAlias = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]

_ANY_OBJECT = json_schema_grammar({"type": "object"})
MAX_TOOLS = 128  # OpenAI's limit


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormatFields(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    grammar: Grammar
    param: str  # field to name in errors


def asked_grammar(fields: Any) -> AskedGrammar | None:
    """Return the grammar that validated GenerationFields ask for, or None.

    Raises:
        InvalidRequest: If more than one field asks for a grammar, or another field contradicts it.
    """
    asked = list(_asked(fields))
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise InvalidRequest(f"{second}: cannot be given together with {first}.", param=second)
    if not asked:
        return None
    check_beside_grammar(fields, asked[0].param)
    return asked[0]


def check_beside_grammar(fields: Any, what: str) -> None:
    """Refuse fields that contradict a grammar, which itself decides where the answer ends."""
    for param in ("use_beam_search", "ignore_eos", "min_tokens"):
        if getattr(fields, param):
            raise InvalidRequest(f"{param}: cannot be given together with {what}.", param=param)


def _asked(fields: Any) -> Iterator[AskedGrammar]:
    if fields.response_format is not None:
        yield from _of_response_format(fields.response_format)
    if fields.structured_outputs is not None:
        yield from _of_structured_outputs(fields.structured_outputs)
    for param, kind in _KINDS.items():
        value = getattr(fields, f"guided_{param}")
        if value is not None:
            yield AskedGrammar(_grammar(kind, value), f"guided_{param}")
    for param, kind in _OF_PEERS.items():
        value = getattr(fields, param)
        if value is not None and value != "":
            yield AskedGrammar(_grammar(kind, value), param)


def _of_response_format(response_format: ResponseFormatFields) -> Iterator[AskedGrammar]:
    if response_format.type == "json_object":
        yield AskedGrammar(_ANY_OBJECT, "response_format")
    elif response_format.type == "json_schema":
        param = "response_format.json_schema"
        if response_format.json_schema is None:
            raise MissingParameter(f"Missing required parameter: {param}.", param=param)
        if response_format.json_schema.schema is None:
            raise MissingParameter(f"Missing required parameter: {param}.schema.", param=f"{param}.schema")
        yield AskedGrammar(json_schema_grammar(response_format.json_schema.schema), f"{param}.schema")


def _of_structured_outputs(outputs: StructuredOutputs) -> Iterator[AskedGrammar]:
    given = [(param, kind) for param, kind in _KINDS.items() if getattr(outputs, param) is not None]
    if len(given) + bool(outputs.json_object) != 1:
        raise InvalidRequest(
            "structured_outputs: expected exactly one of json, json_object, regex, choice, grammar.",
            param="structured_outputs",
        )
    if outputs.json_object:
        yield AskedGrammar(_ANY_OBJECT, "structured_outputs.json_object")
    for param, kind in given:
        yield AskedGrammar(_grammar(kind, getattr(outputs, param)), f"structured_outputs.{param}")


_KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
}

_OF_PEERS = {
    "regex": GrammarKind.REGEX,
    "ebnf": GrammarKind.GRAMMAR,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "grammar": GrammarKind.GRAMMAR,
}


def _grammar(kind: GrammarKind, value: Any) -> Grammar:
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


ArgumentSchema: TypeAlias = Mapping[str, Any]
ANY_OBJECT: ArgumentSchema = {"type": "object"}


def call_schema(functions: Mapping[str, ArgumentSchema], arguments: str = "arguments") -> dict[str, Any]:
    """Return the schema of one call.

    Args:
        functions: Function names and the schemas of their arguments.
        arguments: Key that holds the arguments.
    """
    return {"anyOf": _calls(functions, arguments), "$defs": _definitions(functions)}


def calls_schema(
    functions: Mapping[str, ArgumentSchema], *, is_parallel: bool, arguments: str = "arguments"
) -> dict[str, Any]:
    """Return the schema of a list of at least one call."""
    limit = {} if is_parallel else {"maxItems": 1}
    items = {"anyOf": _calls(functions, arguments)}
    return {"type": "array", "minItems": 1, "items": items, "$defs": _definitions(functions), **limit}


def _calls(functions: Mapping[str, ArgumentSchema], arguments: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: {"$ref": f"#/$defs/{index}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for index, name in enumerate(functions)
    ]


def _definitions(functions: Mapping[str, ArgumentSchema]) -> dict[str, Any]:
    """Return one definition per function; `$ref`s inside are rewritten to point into it."""
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
    """A tool call of an earlier answer, as the server returned it."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


Tools: TypeAlias = Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS)]
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedTools


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a chat may use tools. `definitions` are JSON values for the chat template; `name` is set for a named call."""

    definitions: tuple[dict[str, Any], ...]
    mode: Literal["auto", "required", "named"]
    name: str = ""
    grammar: AskedGrammar | None = None  # for required or named calls
    functions: Mapping[str, ArgumentSchema] = field(default_factory=dict)  # argument schemas of optional calls
    is_parallel: bool = True  # whether one answer may contain several calls

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The parameter schema of each tool, whether or not it is strict."""
        functions = [definition["function"] for definition in self.definitions]
        return {function["name"]: function.get("parameters") or ANY_OBJECT for function in functions}


def tool_use(fields: Any) -> ToolUse | None:
    """Return how a chat with validated types may use tools, or None.

    Raises:
        InvalidRequest: If tools and tool_choice contradict each other.
    """
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
    """Return calls as chat templates expect them, with the arguments as JSON values."""
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
        f"tool_choice.function.name: {name[:128]!r} is not one of the tools; expected one of: {names}.",
        param="tool_choice.function.name",
    )


def _allowed(tools: list[ToolFields], subset: AllowedSubset) -> list[ToolFields]:
    known = {tool.function.name for tool in tools}
    for index, tool in enumerate(subset.tools):
        if tool.function.name not in known:
            param = f"tool_choice.allowed_tools.tools[{index}].function.name"
            raise InvalidRequest(f"{param}: {tool.function.name[:128]!r} is not one of the tools.", param=param)
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
    """Return the definition without null values, because templates print every key."""
    function = {"name": tool.function.name, "description": tool.function.description, "parameters": _parameters(tool)}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _parameters(tool: ToolFields) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}
