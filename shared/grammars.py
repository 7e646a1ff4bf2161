"""Grammars for structured output: the gateway validates them here, the worker compiles them to masks.

llguidance reads all kinds. Its limits are counts instead of times, so a grammar is accepted or refused alike on every
machine; the worst known one takes 0.4 s of a core and 100 MB, and 20 ms per mask. No tokenizer is needed. Whitespace
in JSON is limited, because small models otherwise generate it without end.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, LLParserLimits, grammar_from

from shared.messages import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in its stubs only

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_PROBLEM_CHARS = 300

# Between tokens of JSON: nothing, a space, or a new line with up to 16 spaces of indentation.
_JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r"( |\n {0,16})"}


class GrammarError(ValueError):
    """The grammar is invalid or not supported. The message may be sent to the client."""


def parser_limits() -> LLParserLimits:
    """Return the limits of one grammar; those not set are llguidance's defaults.

    Lexer states take 1-2 kB each, so at most 50 MB. The fuel bounds the time of terminals that double (`A: B B`,
    `B: C C`, ...); ordinary schemas and lists of 64 KB need half of it.
    """
    return LLParserLimits(max_lexer_states=25_000, initial_lexer_fuel=200_000, verbose_errors=False)


def guidance_text(grammar: Grammar) -> str:
    """Return the grammar in llguidance's own format.

    Raises:
        GrammarError: If it cannot be parsed, or is too long.
    """
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"expected at most {MAX_GRAMMAR_BYTES} bytes, got {size}")
    try:
        return _READERS[grammar.kind](grammar.text)
    except (ValueError, TypeError, RecursionError, msgspec.DecodeError) as error:
        raise GrammarError(shortened(str(error))) from error


def check_grammar(grammar: Grammar) -> None:
    """Raise GrammarError unless the grammar is valid and within the limits. Takes up to 0.5 s without the GIL."""
    text = guidance_text(grammar)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    if is_error:
        raise GrammarError(shortened(messages[0]))


def json_schema_grammar(schema: object) -> Grammar:
    """Return the grammar of a JSON schema. Properties are generated in the order of the schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def lark_grammar(rules: Mapping[str, str | Grammar]) -> Grammar:
    """Return the grammar of named rules in Lark's notation or as grammars; one of them is `start`.

    Raises:
        GrammarError: If one of the grammars is invalid.
    """
    lines = [f"{name}: {rule if isinstance(rule, str) else _rule_of(rule)}" for name, rule in rules.items()]
    return Grammar(GrammarKind.GRAMMAR, "\n".join(lines))


def lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def lark_token(token_id: int) -> str:
    """Return Lark's notation of a special token, which has no text."""
    return f"<[{token_id}]>"


def _rule_of(grammar: Grammar) -> str:
    text = guidance_text(grammar)
    if not text.startswith("{"):
        return f"%lark {{\n{text}\n}}"
    (whole,) = json.loads(text)["grammars"]
    if whole["json_schema"] is None:
        return f"%lark {{\n{whole['lark_grammar']}\n}}"
    return f"%json {json.dumps(whole['json_schema'], ensure_ascii=False)}"


def _any_of(choices: str) -> str:
    texts = msgspec.json.decode(choices, type=list[str])
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(lark_text, texts)))


_INTEGER_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_NOT_SCHEMAS = frozenset(("const", "default", "enum", "examples"))  # keywords whose values are data
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1


def _json_schema(text: str) -> str:
    grammar = LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    _check_integer_bounds(json.loads(text))
    return grammar


def _check_integer_bounds(schema: object) -> None:
    """Raise GrammarError for a bound that llguidance would replace by the nearest 64-bit integer."""
    waiting: list[tuple[str, object]] = [("", schema)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            if "integer" in (value.get("type") or ()):  # a name, or a list of names
                _check_bounds_of(path, value)
            waiting += [(f"{path}{name}.", part) for name, part in value.items() if name not in _NOT_SCHEMAS]
        elif isinstance(value, list):
            waiting += [(f"{path}{index}.", part) for index, part in enumerate(value)]


def _check_bounds_of(path: str, schema: Mapping[str, object]) -> None:
    for name in _INTEGER_BOUNDS & schema.keys():
        bound = schema[name]
        if isinstance(bound, int | float) and not MIN_INTEGER <= bound <= MAX_INTEGER:
            raise GrammarError(
                shortened(f"{path}{name}: expected a bound from {MIN_INTEGER} to {MAX_INTEGER}; got {bound}")
            )


_READERS: dict[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: partial(grammar_from, "regex"),
    GrammarKind.CHOICE: _any_of,
    GrammarKind.GRAMMAR: partial(grammar_from, "grammar"),
}


def shortened(message: str) -> str:
    """Return llguidance's message as one short line, because it quotes whole grammars."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_PROBLEM_CHARS else line[:MAX_PROBLEM_CHARS] + " ..."
