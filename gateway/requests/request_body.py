"""Bytes of a request body -> a typed struct, or an error that names the field and what was allowed. Pure.

Stricter than JSON parsers are by themselves: no NaN, no lone surrogates, no duplicate top-level keys (the last would
win silently), no nesting deeper than 32, no bool or "1" for a number. Knows no field of any API.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from gateway.errors import InvalidJson, InvalidRequest, MissingParameter
from gateway.requests.json_structure import MAX_DEPTH, MAX_VALUES, check_structure, check_values

MAX_BODY_BYTES = 2 * 2**20
MAX_FIELDS = 256  # top-level names; all APIs together have about a hundred

_MAX_NAME_CHARS = 256
_SHOWN_CHARS = 200  # of what msgspec says: it may repeat a value of the client
_MAX_SEARCHED_BYTES = 2**16  # a lone surrogate's place is looked for value by value
_MISSING_FIELD = "Object missing required field `"

_Body = TypeVar("_Body", bound=msgspec.Struct)


class _Name(str):
    """Of a top-level field. A type of its own, for msgspec then shows each to its hook."""


class GivenFields(Mapping[str, Any]):
    """The top-level fields as they came. A value is decoded when it is asked for: most have a type, and were."""

    def __init__(self, values: Mapping[_Name, msgspec.Raw]) -> None:
        self._values: Mapping[Any, msgspec.Raw] = values

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{name}: {str(error)[:_SHOWN_CHARS]}.", param=name) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def decode_body(
    body: bytes, kind: type[_Body], *, ids: str = "", max_depth: int = MAX_DEPTH
) -> tuple[_Body, GivenFields]:
    """The typed body, and all its top-level fields as they came, for those that `kind` does not have.

    `ids`: the field that may list token ids, as many as a body has room for.
    """
    if not body.strip():
        raise InvalidJson("The request body is empty; expected a JSON object.")
    check_structure(body, max_depth)
    try:
        text = body.decode()  # also what no field of `kind` reads
        values = _top_level_fields(text)
        if body.count(b",") > MAX_VALUES:
            check_values(bytes(value) for name, value in values.items() if name != ids)
        return msgspec.json.decode(text, type=kind), GivenFields(values)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _refuse_lone_surrogate(body)
        raise InvalidJson(f"The request body is not valid JSON: {str(error)[:_SHOWN_CHARS]}.") from error


def invalid_field(message: str) -> InvalidRequest:
    """msgspec's words, with the path taken out of them as `param`: `$.messages[0].role` is messages[0].role."""
    problem, path = _problem_and_path(message)
    if problem.startswith(_MISSING_FIELD):
        field = problem.removeprefix(_MISSING_FIELD).removesuffix("`")
        param = f"{path}.{field}" if path else field
        return MissingParameter(f"Missing required parameter: {param}.", param=param)
    if len(problem) > _SHOWN_CHARS:
        problem = f"{problem[:_SHOWN_CHARS]}..."
    return InvalidRequest(f"{path or 'request body'}: {problem[0].lower()}{problem[1:]}.", param=path or None)


def decode_object(text: str, param: str) -> dict[str, Any]:
    """Of a field that holds a JSON object as text, such as a call's arguments. Raises InvalidRequest."""
    try:
        encoded = text.encode()
        check_structure(encoded)
        check_values([encoded])
        return msgspec.json.decode(text, type=dict[str, Any])
    except InvalidJson as error:
        raise InvalidRequest(f"{param}: {error.message}", param=param) from error
    except msgspec.DecodeError as error:
        problem = str(error)[:_SHOWN_CHARS]
        raise InvalidRequest(f"{param}: expected a JSON object as text: {problem}.", param=param) from error


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `neutral`, and of the same kind: True is not 1, nor False 0."""
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral)


def _problem_and_path(message: str) -> tuple[str, str]:
    """From the end: before it there may be text of the client that looks like a path."""
    problem, _, place = message.rpartition(" - at `")
    if not problem:
        return message, ""
    path = place.removeprefix("key` in `").removesuffix("`").removeprefix("$")
    return problem, path.removeprefix(".").removesuffix("[...]")


def _top_level_fields(text: str) -> dict[_Name, msgspec.Raw]:
    seen = set[str]()

    def checked(_: type, name: str) -> _Name:
        if len(name) > _MAX_NAME_CHARS:
            raise InvalidRequest(f"{name[:40]}...: the name of a field has at most {_MAX_NAME_CHARS} characters.")
        if name in seen:
            raise InvalidRequest(f"{name}: given more than once.", param=name)
        if len(seen) == MAX_FIELDS:
            raise InvalidRequest(f"The request body has more than {MAX_FIELDS} fields.")
        seen.add(name)
        return _Name(name)

    values: dict[_Name, msgspec.Raw] = msgspec.json.decode(text, type=dict[_Name, msgspec.Raw], dec_hook=checked)
    return values


def _refuse_lone_surrogate(body: bytes) -> None:
    """JSON's grammar allows half a character, `"\\ud800"`; text that can be encoded does not."""
    if len(body) > _MAX_SEARCHED_BYTES:
        return  # msgspec's own words have to do
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
