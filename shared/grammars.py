"""The meaning of a Grammar, for both programs: the gateway refuses a bad one with it, the worker compiles it to masks.

llguidance reads all kinds. It bounds its own work by counts, not by time, so that a grammar is refused or accepted
alike on every machine: the worst known one takes 0.4 s of a core and 100 MB, and 20 ms a mask. Nothing
here needs a tokenizer. Takes away: white space without end, which is valid JSON and what a small model likes to write.

A chat's way in asks it before the queue, a takeover's and every first claim once more. It knows no request.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, LLParserLimits, grammar_from

from shared.messages import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # a name of its stubs alone

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_PROBLEM_CHARS = 300

# Between tokens of JSON: nothing, a blank, or a new line with up to 16 blanks of indentation.
_JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r"( |\n {0,16})"}


class GrammarError(ValueError):
    """Not a grammar, or not one that can be followed here; the message is fit for the client."""


def parser_limits() -> LLParserLimits:
    """Default but for the lexer's states, each 1-2 kB, 50 MB at most for one grammar; and for its fuel, the time of
    terminals that double (`A: B B`, `B: C C`, ...): ordinary schemas and lists of 64 KB need half of it."""
    return LLParserLimits(max_lexer_states=25_000, initial_lexer_fuel=200_000, verbose_errors=False)


def guidance_text(grammar: Grammar) -> str:
    """In llguidance's own form. Raises GrammarError for what is not even JSON, or too long."""
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are read")
    try:
        return _READERS[grammar.kind](grammar.text)
    except (ValueError, TypeError, RecursionError, msgspec.DecodeError) as error:
        raise GrammarError(shortened(str(error))) from error


def check_grammar(grammar: Grammar) -> None:
    """Raise GrammarError unless it is well-formed and within the limits.

    It takes 0.5 s of a core at most, without the GIL.
    """
    text = guidance_text(grammar)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    if is_error:
        raise GrammarError(shortened(messages[0]))


def json_schema_grammar(schema: object) -> Grammar:
    """The grammar of a schema of JSON values. The order of its properties is the order in which they are written."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def lark_grammar(rules: Mapping[str, str | Grammar]) -> Grammar:
    """The grammar of rules in Lark's notation, one of them `start`, and grammars they name. Raises GrammarError."""
    lines = [f"{name}: {rule if isinstance(rule, str) else _rule_of(rule)}" for name, rule in rules.items()]
    return Grammar(GrammarKind.GRAMMAR, "\n".join(lines))


def lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def lark_token(token_id: int) -> str:
    """A token that no text has: one that is special to the model."""
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
    """One line of llguidance's words: it quotes whole grammars."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_PROBLEM_CHARS else line[:MAX_PROBLEM_CHARS] + " ..."
