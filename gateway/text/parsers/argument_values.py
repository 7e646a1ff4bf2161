"""Convert argument values that a model writes in XML or Python notation to JSON by the tool's schema. Pure."""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]  # JSON schema of a function's parameters

_JSON_TYPES: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"
}  # fmt: skip
_MAX_REFERENCES = 16  # of one value: a schema may refer to itself
_MAX_PYTHON_CHARS = 2**16  # of a value in Python notation: parsing 64 KiB takes some 20 ms


def value_types(schema: Schema, name: str) -> frozenset[str]:
    """Return the JSON types that a function's schema allows for an argument; empty if it does not say."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return frozenset()
    return frozenset(_types(properties.get(name), schema, _MAX_REFERENCES))


def _types(value: Any, root: Schema, num_references: int) -> Iterator[str]:
    if not isinstance(value, Mapping):
        return
    named = value.get("type")
    yield from [named] if isinstance(named, str) else named if isinstance(named, list) else []
    constants = value.get("enum", [])
    constants = [*(constants if isinstance(constants, list) else []), *([value["const"]] if "const" in value else [])]
    yield from (_JSON_TYPES[type(one)] for one in constants if type(one) in _JSON_TYPES)
    for key in ("anyOf", "oneOf", "allOf"):
        for one in value.get(key, []) if isinstance(value.get(key), list) else []:
            yield from _types(one, root, num_references - 1) if num_references else ()
    reference = value.get("$ref")
    if isinstance(reference, str) and num_references:
        yield from _types(_resolved(reference, root), root, num_references - 1)


def _resolved(reference: str, root: Schema) -> Any:
    found: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def json_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value.

    Args:
        text: The value as the model wrote it, in JSON or Python notation.
        types: JSON types that the schema allows. A text of another type is a string, and so is any text without types.
    """
    for read in (json.loads, _python_value):
        try:
            value = read(text.strip())
            if _is_allowed(value, types):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)


def _python_value(text: str) -> Any:
    if len(text) > _MAX_PYTHON_CHARS:
        raise ValueError("too long")
    return ast.literal_eval(text)


def _is_allowed(value: Any, types: frozenset[str]) -> bool:
    name = _JSON_TYPES.get(type(value))
    if name == "string":  # quotes around a string are the model's own
        return False
    return (
        name in types
        or (name == "integer" and "number" in types)
        or (isinstance(value, float) and "integer" in types and value.is_integer())
    )


def json_text(text: str) -> str:
    """Return the inside of a JSON string; pieces of a text can be converted separately."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
