"""Bytes of a request body -> its fields, decoded once, and those -> a typed struct, or an error that names the field
and what was allowed. Pure.

    body = decode_body(data)       # one decoding: every other form of the request is made of what it gives
    fields = body.typed(ChatBody)

Stricter than JSON parsers are by themselves: no NaN, no lone surrogates, no duplicate top-level keys (the last would
win silently), no nesting deeper than 32, no bool or "1" for a number. Knows no field of any API.

What a text holds is counted from its bytes before anything is decoded. Every pass is one call of `bytes` and linear,
whatever the text: what is asked first must not itself be what hostile input stops the interpreter with, and every other
client. Nothing here says that a text is JSON: of one that is not, the part that a parser would accept before it stops
is measured as the parser reads it, and never as less.

The counts keep what follows short as well: msgspec holds the interpreter while it decodes, 0.3 us for a name, 0.7 us
for a fraction halfway between two floats, 13 us for 1e308 and 100 us for an integer of 4000 digits.

A chat's way in, where its bytes are decoded.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec

from gateway.errors import InvalidJson, InvalidRequest, MissingParameter

MAX_DEPTH = 32
MAX_CONTAINERS = 2**16  # a conversation of 4096 messages with calls and tools has a quarter of it
MAX_NAMES = 2**16
MAX_FRACTIONS = 2**14
MAX_EXPONENTS = 2**10
MAX_DIGITS = 1024
MAX_VALUES = 2**17  # a model reads two tokens at least for each; lists of token ids are not counted
_TOO_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)
MAX_BODY_BYTES = 2 * 2**20
MAX_FIELDS = 256  # top-level names; all APIs together have about a hundred
_MAX_NAME_CHARS = 256
_SHOWN_CHARS = 200  # of what msgspec says: it may repeat a value of the client
_MAX_SEARCHED_BYTES = 2**16  # a lone surrogate's place is looked for value by value
_MISSING_FIELD = "Object missing required field `"


class _Alphabet(NamedTuple):
    """The bytes of a text that are looked at: some stand for others, and the rest is left out."""

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
    """Raises InvalidJson."""
    text = _without_escapes(text)
    signs, numbers = _signs(text), _numbers(text)
    if signs.count(b"[") > max_depth or signs.count(b":") > MAX_NAMES or signs.count(b".") > MAX_FRACTIONS:
        _check_signs(_outside_strings(signs), max_depth)
    if numbers.count(b"0e") > MAX_EXPONENTS or _TOO_MANY_DIGITS in numbers:
        _check_numbers(_outside_strings(numbers))


def check_values(texts: Iterable[bytes]) -> None:
    """Count the values of all together. Raises InvalidJson."""
    counts = (_outside_strings(_commas(_without_escapes(text))).count(b",") for text in texts)
    _check_count(sum(counts), MAX_VALUES, "values")


def _without_escapes(text: bytes) -> bytes:
    """The quotes that are left begin and end strings, by turns."""
    return text.replace(rb"\\", b"").replace(rb"\"", b"")


def _outside_strings(text: bytes) -> bytes:
    """A string that is never closed holds the rest."""
    # Two quotes in a row change nothing of what is within a string: the split is spared most strings.
    return b"".join(text.replace(b'""', b"").split(b'"')[::2])


def _check_signs(signs: bytes, max_depth: int) -> None:
    _check_count(signs.count(b"["), MAX_CONTAINERS, "arrays and objects")
    _check_count(signs.count(b":"), MAX_NAMES, "names of objects' fields")
    _check_count(signs.count(b"."), MAX_FRACTIONS, "numbers with a fraction")
    brackets = signs.translate(None, delete=b":.")
    for _ in range(max_depth):  # each round takes the innermost level away
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise InvalidJson(f"The JSON is nested deeper than {max_depth} levels, or its brackets do not match.")


def _check_numbers(numbers: bytes) -> None:
    _check_count(numbers.count(b"0e"), MAX_EXPONENTS, "numbers with an exponent")
    if _TOO_MANY_DIGITS in numbers:
        raise InvalidJson(f"The JSON holds a number of more than {MAX_DIGITS} digits.")


def _check_count(count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidJson(f"The JSON holds {count} {what}; at most {most}.")


_Body = TypeVar("_Body", bound=msgspec.Struct)
_Value = TypeVar("_Value")


class _Name(str):
    """The name of a top-level field. Two that are equal are two keys of a dictionary, so that neither is lost."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _as_name(_: type, name: str) -> _Name:
    return _Name(name)


_decoder = msgspec.json.Decoder(dict[_Name, Any], dec_hook=_as_name)
_splitter = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=_as_name)


class JsonBody:
    """A body that was decoded: what it gives by its top-level names, and how long it was.

    Another process gets it as the bytes that it came as, and decodes these where something looks at what they give: one
    that only hands it on has no part in a million token ids.
    """

    __slots__ = ("_data", "_given", "names", "num_bytes")

    def __init__(self, given: dict[str, Any], num_bytes: int, data: bytes = b"") -> None:
        """`data`: what `given` was decoded of, if it is as it came."""
        self.num_bytes = num_bytes
        self.names = frozenset(given)
        self._given: dict[str, Any] | None = given
        self._data = data

    @property
    def given(self) -> dict[str, Any]:
        if self._given is None:
            self._given = _by_name(_decoder.decode(self._data))
        return self._given

    def typed(self, kind: type[_Body]) -> _Body:
        """The fields that `kind` has. Raises InvalidRequest."""
        return typed_fields(self.given, kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_as_it_came, (self._data, self.names)) if self._data else (JsonBody, (self._given, self.num_bytes))


def _as_it_came(data: bytes, names: frozenset[str]) -> JsonBody:
    body = JsonBody({}, len(data), data)
    body._given, body.names = None, names
    return body


def decode_body(data: bytes, *, ids: str = "") -> JsonBody:
    """Raises InvalidJson, or InvalidRequest for a name.

    `ids`: the field that may list token ids, as many as a body has room for.
    """
    text = _checked_text(data, MAX_DEPTH)
    if data.count(b",") > MAX_VALUES:  # so many that the fields are told apart before they are decoded
        check_values(bytes(raw) for name, raw in _split(text).items() if name != ids)
    try:
        return JsonBody(_by_name(_decoder.decode(text)), len(data), data)
    except msgspec.ValidationError as error:  # it does not tell in which field, so they are looked at one by one
        for name, raw in _split(text).items():
            _value(name, raw)
        raise invalid_field(str(error)) from error
    except msgspec.DecodeError as error:
        raise _invalid_json(error, data) from error


def decode_envelope(data: bytes, kind: type[_Body], *, content: str) -> _Body:
    """An object that holds another body as its field `content`, which is a msgspec.Raw of `kind` and stays as it came.

    Raises InvalidJson, or InvalidRequest."""
    fields = _split(_checked_text(data, MAX_DEPTH + 1))
    known = {name: raw for name, raw in fields.items() if name in kind.__struct_fields__}
    return typed_fields({name: raw if name == content else _value(name, raw) for name, raw in known.items()}, kind)


def typed_fields(given: Mapping[str, Any], kind: type[_Body]) -> _Body:
    """The fields of `given` that `kind` has. Raises InvalidRequest."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error)) from error


def _checked_text(data: bytes, max_depth: int) -> str:
    if not data.strip():
        raise InvalidJson("The request body is empty; expected a JSON object.")
    check_structure(data, max_depth)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _invalid_json(error, data) from error


def _split(text: str) -> dict[str, msgspec.Raw]:
    """The fields of an object told apart, none of them decoded."""
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
            raise InvalidRequest(f"{name[:40]}...: the name of a field has at most {_MAX_NAME_CHARS} characters.")
        if name in given:
            raise InvalidRequest(f"{name}: given more than once.", param=name)
        if len(given) == MAX_FIELDS:
            raise InvalidRequest(f"The request body has more than {MAX_FIELDS} fields.")
        given[name] = value
    return given


def _value(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError as error:  # of what no value may be, such as 1e999
        problem, path = _problem_and_path(str(error))
        raise invalid_field(f"{problem} - at `$.{name}{path}`") from error


def _invalid_json(error: Exception, body: bytes | str) -> InvalidJson:
    _refuse_lone_surrogate(body)
    return InvalidJson(f"The request body is not valid JSON: {str(error)[:_SHOWN_CHARS]}.")


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
    """The value of a field that holds a JSON object as text, such as a call's arguments. Raises InvalidRequest."""
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


def _refuse_lone_surrogate(body: bytes | str) -> None:
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
