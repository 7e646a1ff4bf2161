"""Grammars: which are accepted, and which are refused with a message and in bounded time."""

import json
from typing import Any

import pytest

from shared.grammars import MAX_GRAMMAR_BYTES, MAX_PROBLEM_CHARS, GrammarError, check_grammar, json_schema_grammar
from shared.messages import (
    GenerationRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
    decode_request,
    encode,
)

KINDS = GrammarKind

GOOD = [
    (KINDS.JSON_SCHEMA, '{"type": "object"}'),
    (KINDS.JSON_SCHEMA, '{"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}'),
    (KINDS.JSON_SCHEMA, '{"type": "integer", "minimum": 0, "maximum": 9223372036854775807}'),
    (KINDS.JSON_SCHEMA, '{"properties": {"minimum": {"const": {"type": "integer", "minimum": 1e30}}}}'),
    (KINDS.REGEX, r"(a+)+b|\d{4}-\d{2}"),
    (KINDS.CHOICE, '["yes", "no", "\\"quoted\\"\\n", "é"]'),
    (KINDS.GRAMMAR, 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'),
    (KINDS.GRAMMAR, 'root ::= "yes" | "no"'),
]
BAD = [
    (KINDS.JSON_SCHEMA, '{"type": "nothing"}', "Invalid type: nothing"),
    (KINDS.JSON_SCHEMA, '{"uniqueItems": true}', "uniqueItems"),
    (KINDS.JSON_SCHEMA, '{"$ref": "https://example.org/schema"}', "example.org"),
    (KINDS.JSON_SCHEMA, "[]", "object schema"),
    (KINDS.JSON_SCHEMA, '{"type": "integer", "minimum": 1e30, "maximum": 1e31}', "imum: expected a bound from -9223"),
    (KINDS.JSON_SCHEMA, '{"type": ["integer", "null"], "exclusiveMaximum": -1e40}', "exclusiveMaximum: expected"),
    (
        KINDS.JSON_SCHEMA,
        '{"anyOf": [{"properties": {"n": {"type": "integer", "maximum": 9223372036854775808}}}]}',
        "anyOf.0.properties.n.maximum: expected",
    ),
    (KINDS.JSON_SCHEMA, '{"type": ', "EOF"),
    (KINDS.REGEX, "(?=a)", "look-around"),
    (KINDS.REGEX, "[", "unclosed"),
    (KINDS.CHOICE, '"yes"', "array"),
    (KINDS.GRAMMAR, "start: missing", "missing"),
    (KINDS.GRAMMAR, "what is this", ""),
    (KINDS.GRAMMAR, "root ::= (", ""),
]
# Small grammars that would exhaust the time or the stack of a naive compiler.
BOMBS = {
    "deep_json": (KINDS.JSON_SCHEMA, '{"items":' * 6000 + "{}" + "}" * 6000),
    "deep_regex": (KINDS.REGEX, "(" * 30_000 + "a" + ")" * 30_000),
    "deep_lark": (KINDS.GRAMMAR, "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "deep_gbnf": (KINDS.GRAMMAR, "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "doubling_terminals": (
        KINDS.GRAMMAR,
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "a"',
    ),
    "terminals_that_take_0.7_s_within_default_limits": (
        KINDS.GRAMMAR,
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(24)) + '\nA24: "a"',
    ),
    "product_of_alternatives": (
        KINDS.JSON_SCHEMA,
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(9)]}),
    ),
    "too_long": (KINDS.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1)),
}


@pytest.mark.parametrize(("kind", "text"), GOOD)
def test_grammar_valid_is_accepted(kind: GrammarKind, text: str) -> None:
    check_grammar(Grammar(kind, text))


@pytest.mark.parametrize(("kind", "text", "problem"), BAD)
def test_grammar_invalid_is_refused_with_message(kind: GrammarKind, text: str, problem: str) -> None:
    with pytest.raises(GrammarError) as raised:
        check_grammar(Grammar(kind, text))
    assert problem in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", BOMBS)
def test_grammar_bomb_is_refused_in_bounded_time(name: str) -> None:
    with pytest.raises(GrammarError) as raised:
        check_grammar(Grammar(*BOMBS[name]))
    assert len(str(raised.value)) <= MAX_PROBLEM_CHARS + 4


def test_grammar_keeps_order_of_schema_properties() -> None:
    schema: dict[str, Any] = {"properties": {"z": {}, "a": {}, "é": {}}}
    assert json_schema_grammar(schema) == Grammar(KINDS.JSON_SCHEMA, '{"properties": {"z": {}, "a": {}, "é": {}}}')


def test_request_grammar_is_encoded_only_if_set() -> None:
    def request(sampling: SamplingParams) -> GenerationRequest:
        return GenerationRequest(request_id="r", prompt_token_ids=[1], sampling=sampling)

    grammar = Grammar(KINDS.REGEX, "a")
    with_grammar = request(SamplingParams(max_tokens=1, seed=0, grammar=grammar))
    assert decode_request(encode(with_grammar)).sampling.grammar == grammar
    before = request(SamplingParams(max_tokens=1, seed=0))
    assert b"grammar" not in encode(before) and decode_request(encode(before)).sampling.grammar is None
