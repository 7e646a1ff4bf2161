"""Every spelling of a grammar is accepted; an invalid grammar is refused before anything is queued."""

import json
from typing import Any

import pytest

from gateway.apis.chat.schema import parse_chat
from gateway.apis.completions.schema import parse_completion
from gateway.errors import InvalidRequest
from gateway.http.json_body import decode_body
from shared.messages import Grammar, GrammarKind
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import finish, says

CHAT_URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}, "required": ["z"]}
OF_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


def grammar_of(**fields: Any) -> tuple[Grammar, str] | None:
    asked = parse_chat(decode_body(json.dumps({"messages": HI, **fields}).encode())).grammar
    assert parse_completion(decode_body(json.dumps({"prompt": "hi", **fields}).encode())).grammar == asked
    return (asked.grammar, asked.param) if asked else None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, (ANY_OBJECT, "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            (OF_SCHEMA, "response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, (OF_SCHEMA, "structured_outputs.json")),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, (OF_SCHEMA, "structured_outputs.json")),
        ({"structured_outputs": {"json_object": True}}, (ANY_OBJECT, "structured_outputs.json_object")),
        ({"structured_outputs": {"regex": "a+"}}, (Grammar(GrammarKind.REGEX, "a+"), "structured_outputs.regex")),
        (
            {"structured_outputs": {"choice": ["a", "é"]}},
            (Grammar(GrammarKind.CHOICE, '["a", "é"]'), "structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"grammar": "start: A"}},
            (Grammar(GrammarKind.GRAMMAR, "start: A"), "structured_outputs.grammar"),
        ),
        ({"guided_json": SCHEMA}, (OF_SCHEMA, "guided_json")),
        ({"guided_regex": "a+"}, (Grammar(GrammarKind.REGEX, "a+"), "guided_regex")),
        ({"guided_choice": ["a"]}, (Grammar(GrammarKind.CHOICE, '["a"]'), "guided_choice")),
        ({"guided_grammar": "start: A"}, (Grammar(GrammarKind.GRAMMAR, "start: A"), "guided_grammar")),
        ({"regex": "a+"}, (Grammar(GrammarKind.REGEX, "a+"), "regex")),
        ({"ebnf": 'root ::= "a"'}, (Grammar(GrammarKind.GRAMMAR, 'root ::= "a"'), "ebnf")),
        ({"grammar": 'root ::= "a"'}, (Grammar(GrammarKind.GRAMMAR, 'root ::= "a"'), "grammar")),
        ({"json_schema": SCHEMA}, (OF_SCHEMA, "json_schema")),
        ({"json_schema": json.dumps(SCHEMA)}, (OF_SCHEMA, "json_schema")),
        ({"grammar": "", "regex": "", "ebnf": "", "json_schema": ""}, None),
    ],
)
def test_grammar_in_every_spelling_is_accepted(fields: dict[str, Any], expected: tuple[Grammar, str] | None) -> None:
    assert grammar_of(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "use_beam_search": True}, "use_beam_search"),
        ({"regex": "a", "json_schema": SCHEMA}, "json_schema"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar"),
        ({"grammar": {"type": "regex", "value": "a"}}, "grammar"),
        ({"ebnf": 'root ::= "a"', "ignore_eos": True}, "ignore_eos"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
    ],
)
def test_invalid_grammar_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        grammar_of(**fields)
    assert raised.value.param == param and param in raised.value.message


@pytest.mark.parametrize(
    ("fields", "param", "code", "word"),
    [
        ({"guided_json": {"type": "nothing"}}, "guided_json", "invalid_json_schema", "nothing"),
        ({"guided_json": {"type": "integer", "minimum": 1e30}}, "guided_json", "invalid_json_schema", "minimum"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "invalid_json_schema",
            "not",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "invalid_grammar", "unclosed"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "invalid_grammar", "missing"),
        ({"regex": "("}, "regex", "invalid_grammar", "unclosed"),
        ({"json_schema": {"type": "nothing"}}, "json_schema", "invalid_json_schema", "nothing"),
        ({"grammar": "root ::= missing"}, "grammar", "invalid_grammar", "missing"),
    ],
)
async def test_unsupported_grammar_is_refused_before_queueing(
    gateway: Gateway, fields: dict[str, Any], param: str, code: str, word: str
) -> None:
    async with gateway.session.post(CHAT_URL, json={"messages": HI, **fields}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"], error["code"]) == (400, param, code)
    assert word in error["message"]
    assert gateway.engine.requests == []


async def test_grammar_reaches_the_engine(gateway: Gateway) -> None:
    gateway.engine.script = says([80])
    async with gateway.session.post(CHAT_URL, json={"messages": HI, "guided_regex": "a+"}) as response:
        assert response.status == 200
    assert gateway.engine.requests[0].sampling.grammar == Grammar(GrammarKind.REGEX, "a+")
    gateway.engine.script = lambda request: [finish(request, 0)]
    async with gateway.session.post(CHAT_URL, json={"messages": HI}) as response:
        assert response.status == 200
    assert gateway.engine.requests[1].sampling.grammar is None
