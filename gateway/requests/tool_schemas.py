"""JSON schemas of calls: each is an object {"name", "arguments"}, the arguments by the function's schema. Pure."""

from collections.abc import Mapping
from typing import Any, TypeAlias

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
