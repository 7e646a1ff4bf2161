"""Bytes of a request body -> a typed struct, or an error that names the field and what was allowed. Pure.

Stricter than JSON parsers are by themselves: no NaN, no lone surrogates, no duplicate top-level keys (the last would
win silently), no nesting deeper than 32, no bool or "1" for a number. Knows no field of any API.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import msgspec

from gateway.errors import InvalidJson, InvalidRequest, MissingParameter

MAX_BODY_BYTES = 2 * 2**20
MAX_DEPTH = 32

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND_OF_BRACKET = bytes.maketrans(b"{}", b"[]")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>[^`]+)`")
_LOCATION = re.compile(r" - at (?:`key` in )?`\$(?P<path>.*)`$")

_Body = TypeVar("_Body", bound=msgspec.Struct)


def decode_body(body: bytes, kind: type[_Body]) -> tuple[_Body, dict[str, Any]]:
    """The typed body, and all its top-level fields as they came, for those that `kind` does not have."""
    if not body.strip():
        raise InvalidJson("The request body is empty; expected a JSON object.")
    _check_depth(body)
    try:
        typed = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _refuse_lone_surrogate(body)
        raise InvalidJson(f"The request body is not valid JSON: {error}.") from error
    return typed, _top_level_fields(body)


def invalid_field(message: str) -> InvalidRequest:
    """msgspec's words, with the path taken out of them as `param`: `$.messages[0].role` is messages[0].role."""
    location = _LOCATION.search(message)
    path = location["path"].removeprefix(".").removesuffix("[...]") if location else ""
    problem = message[: location.start()] if location else message
    missing = _MISSING_FIELD.fullmatch(problem)
    if missing:
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return MissingParameter(f"Missing required parameter: {param}.", param=param)
    return InvalidRequest(f"{path or 'request body'}: {problem[0].lower()}{problem[1:]}.", param=path or None)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `neutral`, and of the same kind: True is not 1, nor False 0."""
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral)


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(_ONE_KIND_OF_BRACKET, delete=_NOT_BRACKETS)
    for _ in range(MAX_DEPTH):  # each round takes the innermost level away, at the speed of bytes.replace
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise InvalidJson(f"The request body is nested deeper than {MAX_DEPTH} levels, or its brackets do not match.")


def _top_level_fields(body: bytes) -> dict[str, Any]:
    pairs: list[tuple[str, Any]] = []

    def keep_last(object_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = object_pairs  # the outermost object is closed, and so reported, last
        return dict(object_pairs)

    try:
        fields: dict[str, Any] = json.loads(body, object_pairs_hook=keep_last, parse_constant=_no_constant)
    except ValueError as error:  # an integer of thousands of digits in a field that msgspec had no use for
        raise InvalidJson(f"The request body is not valid JSON: {error}.") from error
    if len(fields) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidRequest(f"{name}: given more than once.", param=name)
    return fields


def _refuse_lone_surrogate(body: bytes) -> None:
    """JSON's grammar allows half a character, `"\\ud800"`; text that can be encoded does not."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except ValueError:
        return
    for path, text in _strings(value, ""):
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            param = path.removeprefix(".")
            raise InvalidRequest(f"{param}: holds a lone surrogate, which no Unicode text has.", param=param or None)


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield path, key
            yield from _strings(item, f"{path}.{key}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
