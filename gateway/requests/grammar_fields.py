"""The fields that ask for output of a certain form -> a Grammar. Pure.

    response_format                                   OpenAI's: text, json_object, json_schema
    structured_outputs {json, regex, choice, ...}     vLLM's
    guided_json, guided_regex, guided_choice, ...     vLLM's, before it had that
    regex, ebnf, json_schema                          SGLang's
    grammar, json_schema                              llama.cpp's; an empty text there asks for nothing

One of them at a time. A schema is always followed to the letter, whatever `strict` says; one with keywords that cannot
be followed is refused rather than followed in part. Does not read the grammars themselves (shared/grammars.py does).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest, MissingParameter
from shared.grammars import json_schema_grammar
from shared.messages import Grammar, GrammarKind

Schema: TypeAlias = dict[str, Any] | str  # as a JSON object, or its text
Choices: TypeAlias = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]

_ANY_OBJECT = json_schema_grammar({"type": "object"})


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
    param: str  # the field to name when something is wrong with it


def asked_grammar(fields: Any) -> AskedGrammar | None:
    """`fields`: GenerationFields, whose types are checked already. Raises InvalidRequest."""
    asked = list(_asked(fields))
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise InvalidRequest(f"{second}: cannot be given together with {first}.", param=second)
    if not asked:
        return None
    check_beside_grammar(fields, asked[0].param)
    return asked[0]


def check_beside_grammar(fields: Any, what: str) -> None:
    """Refuse what a grammar contradicts: its own end is the end of the answer, and a beam search follows none."""
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
