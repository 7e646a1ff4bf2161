"""Decoding of a request body: bytes become fields once, and fields become a typed struct or an error naming the field.

    body = decode_body(data)       # the only decoding
    fields = body.typed(ChatBody)

Stricter than JSON parsers: no NaN, no lone surrogates, no duplicate top-level keys, no nesting deeper than 32, no bool
or "1" where a number is expected. Pure; independent of any API.

The structure is counted from the bytes before decoding. Each pass is one call of a `bytes` method and linear in time,
because these checks must not block the interpreter on hostile input. The counts never undercount what a parser would
accept. They also bound the decoding time, during which msgspec holds the interpreter: 0.3 us for a name, 0.7 us for a
fraction halfway between two floats, 13 us for 1e308, and 100 us for an integer of 4,000 digits.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from gateway.errors import InvalidJson, InvalidRequest, MissingParameter

MAX_DEPTH = 32
MAX_CONTAINERS = 2**16  # four times those of a conversation of 4,096 messages with calls and tools
MAX_NAMES = 2**16
MAX_FRACTIONS = 2**14
MAX_EXPONENTS = 2**10
MAX_DIGITS = 1024
MAX_VALUES = 2**17  # each costs a model at least two tokens; lists of token ids are not counted
_TOO_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)
MAX_BODY_BYTES = 2 * 2**20
MAX_FIELDS = 256  # top-level names; all APIs together have about a hundred
_MAX_NAME_CHARS = 256
_SHOWN_CHARS = 200  # of a msgspec error, which may repeat a value of the client
_MAX_SEARCHED_BYTES = 2**16  # the search for the path of a lone surrogate visits every value
_MISSING_FIELD = "Object missing required field `"


class _Alphabet(NamedTuple):
    """A byte translation that maps some bytes to others and deletes the rest."""

    alike: bytes
    others: bytes

    def __call__(self, text: bytes) -> bytes:
        return text.translate(self.alike, delete=self.others)


def _alphabet(kept: bytes, written: bytes, as_written: bytes) -> _Alphabet:
    return _Alphabet(bytes.maketrans(written, as_written), bytes(set(range(256)) - set(kept + written)))


_signs = _alphabet(b'[]:."', b"{}", b"[]")
_commas = _alphabet(b',"', b"", b"")
_numbers = _alphabet(b'0e,"', b"123456789E", b"000000000e")


def check_structure(text: bytes, max_depth: int = MAX_DEPTH) -> None:
    """Raise InvalidJson if the text exceeds a limit of structure."""
    text = _without_escapes(text)
    signs, numbers = _signs(text), _numbers(text)
    if signs.count(b"[") > max_depth or signs.count(b":") > MAX_NAMES or signs.count(b".") > MAX_FRACTIONS:
        _check_signs(_outside_strings(signs), max_depth)
    if numbers.count(b"0e") > MAX_EXPONENTS or _TOO_MANY_DIGITS in numbers:
        _check_numbers(_outside_strings(numbers))


def check_values(texts: Iterable[bytes]) -> None:
    """Raise InvalidJson if the texts together hold too many values."""
    counts = (_outside_strings(_commas(_without_escapes(text))).count(b",") for text in texts)
    _check_count(sum(counts), MAX_VALUES, "values")


def _without_escapes(text: bytes) -> bytes:
    """Remove escapes, so that the remaining quotes alternately open and close strings."""
    return text.replace(rb"\\", b"").replace(rb"\"", b"")


def _outside_strings(text: bytes) -> bytes:
    """Return the text outside strings; an unclosed string extends to the end."""
    # Removing empty strings first leaves the split with fewer pieces and does not change the result.
    return b"".join(text.replace(b'""', b"").split(b'"')[::2])


def _check_signs(signs: bytes, max_depth: int) -> None:
    _check_count(signs.count(b"["), MAX_CONTAINERS, "arrays and objects")
    _check_count(signs.count(b":"), MAX_NAMES, "names of objects' fields")
    _check_count(signs.count(b"."), MAX_FRACTIONS, "numbers with a fraction")
    brackets = signs.translate(None, delete=b":.")
    for _ in range(max_depth):  # each round removes the innermost level
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise InvalidJson(f"The JSON is nested deeper than {max_depth} levels, or its brackets do not match.")


def _check_numbers(numbers: bytes) -> None:
    _check_count(numbers.count(b"0e"), MAX_EXPONENTS, "numbers with an exponent")
    if _TOO_MANY_DIGITS in numbers:
        raise InvalidJson(f"The JSON contains a number of more than {MAX_DIGITS} digits.")


def _check_count(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidJson(f"The JSON contains {count} {what}; at most {limit} are allowed.")


_Body = TypeVar("_Body", bound=msgspec.Struct)
_Value = TypeVar("_Value")


class _Name(str):
    """Name of a top-level field; equal names are distinct dictionary keys, so that duplicates can be detected."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _as_name(_: type, name: str) -> _Name:
    return _Name(name)


_decoder = msgspec.json.Decoder(dict[_Name, Any], dec_hook=_as_name)
_splitter = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=_as_name)


class JsonBody:
    """A decoded body: its top-level fields and its length.

    It is pickled as the original bytes and decoded again only when the fields are read, so a process that only forwards
    the body does not pay for a million token ids.
    """

    __slots__ = ("_data", "_given", "names", "num_bytes")

    def __init__(
        self, given: dict[str, Any] | None, num_bytes: int, data: bytes = b"", names: frozenset[str] = frozenset()
    ) -> None:
        """Create a body.

        Args:
            given: The fields; None: those of `data`, whose names are `names`.
            num_bytes: Length of the body.
            data: The original bytes if `given` is unchanged.
            names: Only without `given`.
        """
        self.num_bytes = num_bytes
        self.names = names if given is None else frozenset(given)
        self._given = given
        self._data = data

    @property
    def given(self) -> dict[str, Any]:
        if self._given is None:
            self._given = _by_name(_decoder.decode(self._data))
        return self._given

    def typed(self, kind: type[_Body]) -> _Body:
        """Return the fields that `kind` has; raise InvalidRequest."""
        return typed_fields(self.given, kind)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._data:
            return JsonBody, (None, self.num_bytes, self._data, self.names)
        return JsonBody, (self._given, self.num_bytes)


def decode_body(data: bytes, *, ids: str = "") -> JsonBody:
    """Decode a body.

    Args:
        data: The bytes of the body.
        ids: Name of the field that may list any number of token ids.

    Raises:
        InvalidJson: If the bytes are not JSON or exceed a limit.
        InvalidRequest: If a field name is repeated or too long, or a value is out of range.
    """
    text = _checked_text(data, MAX_DEPTH)
    if data.count(b",") > MAX_VALUES:  # then count per field, without the field of token ids
        check_values(bytes(raw) for name, raw in _split(text).items() if name != ids)
    try:
        return JsonBody(_by_name(_decoder.decode(text)), len(data), data)
    except msgspec.ValidationError as error:  # the error lacks the field: decode the fields one by one
        for name, raw in _split(text).items():
            _value(name, raw)
        raise invalid_field(str(error)) from error
    except msgspec.DecodeError as error:
        raise _invalid_json(error, data) from error


def decode_envelope(data: bytes, kind: type[_Body], *, content: str) -> _Body:
    """Decode an object whose field `content` is another body; that field stays raw (a msgspec.Raw of `kind`).

    Raises:
        InvalidJson: If the bytes are not JSON or exceed a limit.
        InvalidRequest: If a field is invalid.
    """
    fields = _split(_checked_text(data, MAX_DEPTH + 1))
    known = {name: raw for name, raw in fields.items() if name in kind.__struct_fields__}
    return typed_fields({name: raw if name == content else _value(name, raw) for name, raw in known.items()}, kind)


def typed_fields(given: Mapping[str, Any], kind: type[_Body]) -> _Body:
    """Convert the fields of `given` that `kind` has; raise InvalidRequest."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(_with_allowed_values(str(error), kind)) from error


def _with_allowed_values(message: str, kind: type[msgspec.Struct]) -> str:
    """Add the values of a top-level field to msgspec's error for an unknown one, which does not list them."""
    problem, path = _problem_and_path(message)
    hint = get_type_hints(kind).get(path) if problem.startswith("Invalid enum value") else None
    literals = [option for option in (hint, *get_args(hint)) if get_origin(option) is Literal]
    allowed = [repr(value) for literal in literals for value in get_args(literal)]
    return f"{problem}; expected {' or '.join(allowed)} - at `$.{path}`" if allowed else message


def _checked_text(data: bytes, max_depth: int) -> str:
    if not data.strip():
        raise InvalidJson("The request body is empty; expected a JSON object.")
    check_structure(data, max_depth)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _invalid_json(error, data) from error


def _split(text: str) -> dict[str, msgspec.Raw]:
    """Split an object into its fields without decoding the values."""
    try:
        return _by_name(_splitter.decode(text))
    except msgspec.ValidationError as error:
        raise invalid_field(str(error)) from error
    except msgspec.DecodeError as error:
        raise _invalid_json(error, text) from error


def _by_name(values: Mapping[_Name, _Value]) -> dict[str, _Value]:
    names = list(map(str, values))
    given = dict(zip(names, values.values(), strict=True))
    if len(given) == len(names) <= MAX_FIELDS and len("".join(names)) <= _MAX_NAME_CHARS:  # nearly always
        return given
    given = {}
    for name, value in zip(names, values.values(), strict=True):
        if len(name) > _MAX_NAME_CHARS:
            raise InvalidRequest(f"{name[:40]}...: field names have at most {_MAX_NAME_CHARS} characters.")
        if name in given:
            raise InvalidRequest(f"{name}: given more than once.", param=name)
        if len(given) == MAX_FIELDS:
            raise InvalidRequest(f"The request body has more than {MAX_FIELDS} fields.")
        given[name] = value
    return given


def _value(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError as error:  # for example 1e999
        problem, path = _problem_and_path(str(error))
        raise invalid_field(f"{problem} - at `$.{name}{path}`") from error


def _invalid_json(error: Exception, body: bytes | str) -> InvalidJson:
    _refuse_lone_surrogate(body)
    return InvalidJson(f"The request body is not valid JSON: {str(error)[:_SHOWN_CHARS]}.")


def invalid_field(message: str) -> InvalidRequest:
    """Convert a msgspec error; its path becomes `param`, `$.messages[0].role` as messages[0].role."""
    problem, path = _problem_and_path(message)
    if problem.startswith(_MISSING_FIELD):
        field = problem.removeprefix(_MISSING_FIELD).removesuffix("`")
        param = f"{path}.{field}" if path else field
        return MissingParameter(f"Missing required parameter: {param}.", param=param)
    if len(problem) > _SHOWN_CHARS:
        problem = f"{problem[:_SHOWN_CHARS]}..."
    return InvalidRequest(f"{path or 'request body'}: {problem[0].lower()}{problem[1:]}.", param=path or None)


def decode_object(text: str, param: str) -> dict[str, Any]:
    """Decode a field that holds a JSON object as text, such as the arguments of a call; raise InvalidRequest."""
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
    """Return whether `value` is one of `neutral`; True is not 1, and False is not 0."""
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral)


def _problem_and_path(message: str) -> tuple[str, str]:
    """Split a msgspec error at its last path; text of the client before it may look like a path too."""
    problem, _, place = message.rpartition(" - at `")
    if not problem:
        return message, ""
    path = place.removeprefix("key` in `").removesuffix("`").removeprefix("$")
    return problem, path.removeprefix(".").removesuffix("[...]")


def _refuse_lone_surrogate(body: bytes | str) -> None:
    r"""Raise InvalidRequest for a lone surrogate such as `"\ud800"`, which JSON allows and UTF-8 does not."""
    if len(body) > _MAX_SEARCHED_BYTES:
        return  # the caller then reports msgspec's error
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except ValueError:
        return
    for path, text in _strings(value, ""):
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            param = path.removeprefix(".")
            raise InvalidRequest(f"{param}: contains a lone surrogate, which is not valid text.", param=param or None)


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
