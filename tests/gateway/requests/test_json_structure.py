"""The structure check of JSON is exact, and its time is linear in the text for any input."""

import json
import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.chat.kinds import CHAT
from gateway.apis.completions.kinds import COMPLETION
from gateway.errors import InvalidJson, InvalidRequest
from gateway.http import json_body as structure
from gateway.http.json_body import MAX_BODY_BYTES, check_structure
from gateway.pipeline.request import CompletionRequest
from tests.idle_seconds import idle_seconds

HI = b'{"messages":[{"role":"user","content":"x"}],'
ANY = HI + b'"tools":[{"type":"function","function":{"name":"a","parameters":{"x":['
QUADRATIC_SECONDS = 3.0  # the slowest shape takes 0.09 s on an idle core; a quadratic check takes minutes to hours


def parse_chat(data: bytes) -> CompletionRequest:
    return CHAT.parse(CHAT.decode(data))


def parse_completion(data: bytes) -> CompletionRequest:
    return COMPLETION.parse(COMPLETION.decode(data))


def depth_of(text: bytes) -> int:
    """Return the depth, character by character: the reference for check_structure()."""
    depth = deepest = 0
    in_string = is_escaped = False
    for byte in text.decode():
        if in_string:
            in_string = is_escaped or byte != '"'
            is_escaped = byte == "\\" and not is_escaped
        elif byte == '"':
            in_string = True
        elif byte in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in "]}":
            depth -= 1
    return deepest


def filled(start: bytes, unit: bytes, end: bytes, size: int) -> bytes:
    return start + unit * ((size - len(start) - len(end)) // len(unit)) + end


SHAPES: dict[str, Callable[[int], bytes]] = {
    "an open string of quotes": lambda size: filled(b'{"messages":' + b"[" * 33 + b'"', b'\\"', b"", size),
    "an open string of backslashes": lambda size: filled(b'{"messages":' + b"[" * 33 + b'"', b"\\", b"", size),
    "open strings": lambda size: filled(b"[" * 33, b'"\\', b"", size),
    "open brackets": lambda size: filled(b'{"a":', b"[", b"", size),
    "open objects": lambda size: filled(b"", b'{"a":', b"1", size),
    "small objects": lambda size: filled(HI + b'"x":[', b"{},", b"1]}", size),
    "levels": lambda size: filled(HI + b'"x":[', b"[" * 30 + b"]" * 30 + b",", b"1]}", size),
    "brackets in strings": lambda size: filled(HI + b'"x":[', b'"[",[],', b"1]}", size),
    "a bracket in each string": lambda size: filled(HI + b'"x":' + b"[" * 40, b'"[",[', b"1]}", size),
    "empty strings": lambda size: filled(ANY, b'"",', b"1]}}}]}", size),
    "escapes": lambda size: filled(HI + b'"x":"', b"\\u0101", b'"}', size),
    "lone surrogates": lambda size: filled(HI + b'"x":["', b"\\ud800", b'"]}', size),
    "a lone surrogate after many values": lambda size: filled(HI + b'"x":[', b"1,", b'"\\ud800"]}', size),
    "ids": lambda size: filled(b'{"prompt":[', b"1,", b"1]}", size),
    "whole numbers": lambda size: filled(ANY, b"1,", b"1]}}}]}", size),
    "fractions": lambda size: filled(ANY, b"9007199254740993.0,", b"1]}}}]}", size),
    "exponents": lambda size: filled(ANY, b"1e308,", b"1]}}}]}", size),
    "biases": lambda size: filled(HI + b'"logit_bias":{', b'"1":1e308,', b'"1":1}}', size),
    "digits": lambda size: filled(HI + b'"x":', b"1", b"}", size),
    "rows of digits": lambda size: filled(ANY, b"1" * 1024 + b",", b"1]}}}]}", size),
    "numbers in strings": lambda size: filled(ANY, b'"1e1",1,', b"1]}}}]}", size),
    "fields": lambda size: HI + b",".join(b'"%x":1' % number for number in range(size // 11)) + b"}",
    "one field": lambda size: filled(HI, b'"a":1,', b'"a":1}', size),
    "names": lambda size: ANY + b"{" + b",".join(b'"%x":1' % n for n in range(size // 11)) + b"}]}}}]}",
    "parts": lambda size: filled(HI[:-2] + b',{"role":"user","content":[', b'{"type":"text"},', b"1]}]}", size),
    "white space": lambda size: filled(HI, b" ", b'"x":1}', size),
    "a value that looks like a path": lambda size: filled(HI + b'"tool_choice":"', b" - at `$", b'"}', size),
    "NUL": lambda size: filled(HI + b'"x":"', b"\x00", b'"}', size),
    "UTF-16": lambda size: filled(HI, b"a", b"}", size // 2).decode().encode("utf-16"),
    "invalid UTF-8": lambda size: filled(HI + b'"x":"', b"\xed\xa0\x80", b'"}', size),
}


def parse_or_refuse(parse: Callable[[bytes], CompletionRequest], body: bytes) -> None:
    try:
        parse(body)
    except InvalidRequest as error:
        assert len(error.message) < 500


@pytest.mark.timeout(600)  # bodies of 2 MiB: not for `make quick`
@pytest.mark.parametrize("shape", SHAPES)
def test_check_time_is_linear_for_any_body(shape: str) -> None:
    for parse in (parse_chat, parse_completion):
        for size in (2**16, MAX_BODY_BYTES):
            body = SHAPES[shape](size)
            assert idle_seconds(partial(parse_or_refuse, parse, body)) < QUADRATIC_SECONDS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[" * 33 + b"]" * 33, "32 levels"),
        (b"[" * 33 + b'"' + b"]" * 33, "32 levels"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "32 levels"),
        (b"[" + b"{}," * structure.MAX_CONTAINERS + b"1]", "arrays and objects; at most 65536"),
        (b'{"a":1' + b',"a":1' * structure.MAX_NAMES + b"}", "65537 names"),
        (b"[" + b"1.5," * structure.MAX_FRACTIONS + b"1.5]", "16385 numbers with a fraction"),
        (b"[" + b"1e3," * structure.MAX_EXPONENTS + b"1E3]", "1025 numbers with an exponent"),
        (b"[-" + b"1" * (structure.MAX_DIGITS + 1) + b"]", "1024 digits"),
    ],
)
def test_one_above_each_limit_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(InvalidJson, match=says):
        check_structure(text)


def test_exact_limits_are_accepted() -> None:
    check_structure(b"[" * 32 + b"]" * 32)
    check_structure(b"[" * 31 + b'"\\"[[[[[[[\\\\"' + b"]" * 31)
    check_structure(b"[" + b"[]," * (structure.MAX_CONTAINERS - 2) + b"[]]")
    check_structure(b'{"a":1' + b',"a":1' * (structure.MAX_NAMES - 1) + b"}")
    check_structure(b"[" + b"1.5," * (structure.MAX_FRACTIONS - 1) + b"1.5]")
    check_structure(b"[" + b"1e3," * (structure.MAX_EXPONENTS - 1) + b"1e3]")
    check_structure(b"[" + b"1" * structure.MAX_DIGITS + b"," + b"1" * structure.MAX_DIGITS + b"]")


def test_number_of_values_is_limited_except_for_token_ids() -> None:
    ids = b"[1" + b",1" * (structure.MAX_VALUES + 1) + b"]"
    most = b"[1" + b",1" * (structure.MAX_VALUES - 1) + b"]"  # and one comma is in HI
    request = parse_completion(b'{"prompt":' + ids + b',"x":"' + b"," * structure.MAX_VALUES + b'"}')
    assert request.prompts == ([1] * (structure.MAX_VALUES + 2),)
    parse_chat(HI + b'"x":' + most + b"}")
    other = b'{"prompt":"x","x":' + ids + b"}"
    for parse, body in ((parse_completion, other), (parse_chat, HI + b'"x":' + ids[:-3] + b"]}")):
        with pytest.raises(InvalidJson, match="131073 values; at most 131072"):
            parse(body)


def test_string_content_is_text() -> None:
    text = "[{" * 40_000 + "1e9 0.5 a:b " * 20_000 + "1" * 5_000
    check_structure(json.dumps({"a": text, text[:100]: [text, '"' + text]}).encode())


_VALUES = st.recursive(
    st.none() | st.integers() | st.text('[]{}"\\:,a', max_size=6),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text('[]"\\', max_size=3), values, max_size=3),
    max_leaves=12,
)


@given(value=_VALUES, levels=st.integers(25, 40), indent=st.none() | st.integers(0, 1))
def test_depth_is_exact(value: object, levels: int, indent: int | None) -> None:
    for _ in range(levels):
        value = [value]
    text = json.dumps(value, indent=indent).encode()
    if depth_of(text) <= structure.MAX_DEPTH:
        check_structure(text)
    else:
        with pytest.raises(InvalidJson, match="32 levels"):
            check_structure(text)


def test_invalid_json_is_refused_without_other_errors() -> None:
    rng = random.Random(1)
    pieces = [
        b'"',
        b"\\",
        b"\\\\",
        b'\\"',
        b"[" * 33,
        b"[",
        b"]",
        b"{",
        b"}",
        b":",
        b",",
        b"1e9",
        b"\\ud800",
        b"\xff",
        b"\0",
    ]
    for _ in range(3000):
        body = HI + b"".join(rng.choices(pieces, k=rng.randrange(1, 60)))
        with pytest.raises(InvalidRequest):
            parse_chat(body)
