"""The formats in which model families write tool calls and reasoning, and their choice from the chat template. Pure.

A template contains the tags that its model writes. The first format whose marks are all in the template is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from gateway.text.parsers import deepseek_calls, gemma4_calls, harmony, lfm2_calls, reasoning
from gateway.text.parsers.argument_values import Schema
from gateway.text.parsers.bare_calls import BareCalls
from gateway.text.parsers.parts import Parser, ReasoningParser
from gateway.text.parsers.reasoning import ThinkTags, think_tags
from gateway.text.parsers.tagged_calls import GLM45, QWEN3_CODER, TaggedCalls
from gateway.text.parsers.tool_calls import MarkedCalls, hermes, mistral

AUTO, NONE = "auto", "none"
HARMONY = "harmony"  # its parser reads reasoning, calls, and content in one


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family writes tool calls.

    Attributes:
        name: Value of --tool-call-parser.
        marks: Texts that a chat template of the family contains.
        special_tokens: Tokens that the parser needs as text; the first begins a call.
        parser: Function from the parameter schema of each tool to a parser. It also reads bare JSON calls where models
            of the family write them.
        in_grammar: Family of GRAMMAR_FAMILIES whose notation a grammar for an answer or calls uses.
    """

    name: str
    marks: tuple[str, ...]
    special_tokens: tuple[str, ...]
    parser: Callable[[Mapping[str, Schema]], Parser]
    in_grammar: str = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family writes reasoning; `parser` takes the end of the rendered prompt, and the start of a call or ""."""

    name: str
    marks: tuple[str, ...]
    special_tokens: tuple[str, ...]
    parser: Callable[[str, str], ReasoningParser]


def _json_calls(name: str, mark: str, make: Callable[[], Parser]) -> CallFormat:
    return CallFormat(
        name=name,
        marks=(mark,),
        special_tokens=(mark,),
        parser=lambda schemas: BareCalls(schemas.keys(), make()),
        in_grammar=name,
    )


def _own_calls(
    name: str, marks: tuple[str, ...], tokens: tuple[str, ...], parser: Callable[[Mapping[str, Schema]], Parser]
) -> CallFormat:
    return CallFormat(name=name, marks=marks, special_tokens=tokens, parser=parser)


_LLAMA3_MARK = "<|python_tag|>"
_HERMES = _json_calls("hermes", "<tool_call>", hermes)
_DEEPSEEK_TOKENS = (
    deepseek_calls.CALLS, deepseek_calls.CALLS_END, deepseek_calls.CALL, deepseek_calls.CALL_END,
    deepseek_calls.SEPARATOR,
)  # fmt: skip
# The most specific marks come first: templates of several families contain <tool_call>.
_CALLS = (
    _own_calls(
        HARMONY, (harmony.CHANNEL, harmony.MESSAGE), harmony.SPECIAL_TOKENS, lambda schemas: harmony.Harmony()
    ),
    _own_calls(
        "gemma4", (gemma4_calls.MARK,), (gemma4_calls.MARK, gemma4_calls.END, gemma4_calls.QUOTE),
        lambda schemas: gemma4_calls.Gemma4Calls(schemas.keys()),
    ),
    _own_calls(
        "glm45", (GLM45.key,), (GLM45.call, GLM45.call_end, GLM45.key, GLM45.key_end, GLM45.value, GLM45.value_end),
        lambda schemas: TaggedCalls(GLM45, schemas),
    ),
    _own_calls(
        "qwen3_coder", (QWEN3_CODER.call,), ("<tool_call>", "</tool_call>"),
        lambda schemas: TaggedCalls(QWEN3_CODER, schemas),
    ),
    _own_calls(
        "lfm2", (lfm2_calls.MARK,), (lfm2_calls.MARK, lfm2_calls.END), lambda schemas: lfm2_calls.Lfm2Calls()
    ),
    _own_calls(
        "deepseek_v3", (deepseek_calls.CALLS,), _DEEPSEEK_TOKENS, lambda schemas: deepseek_calls.DeepSeekCalls()
    ),
    _json_calls("mistral", "[TOOL_CALLS]", mistral),
    CallFormat(
        name="llama3_json",
        marks=(_LLAMA3_MARK,),
        special_tokens=(_LLAMA3_MARK,),
        parser=lambda schemas: BareCalls(schemas.keys(), MarkedCalls(_LLAMA3_MARK), are_taught=True),
        in_grammar="llama3_json",
    ),
    _HERMES,
)  # fmt: skip
# value of --tool-call-parser -> format; the second names are vLLM's
CALL_FORMATS: Mapping[str, CallFormat] = {
    **{one.name: one for one in _CALLS},
    **{
        alias: next(one for one in _CALLS if one.name == name)
        for alias, name in {
            "openai": "harmony", "glm47": "glm45", "qwen3_xml": "qwen3_coder", "deepseek_v31": "deepseek_v3"
        }.items()
    },
}  # fmt: skip


def _thinks(name: str, tags: tuple[str, str], tokens: tuple[str, ...], *marks: str) -> ReasoningFormat:
    return ReasoningFormat(name=name, marks=marks, special_tokens=tokens, parser=partial(think_tags, tags))


_REASONING = (
    ReasoningFormat(
        name=HARMONY,
        marks=(harmony.CHANNEL, harmony.MESSAGE),
        special_tokens=harmony.SPECIAL_TOKENS,
        parser=lambda prompt_end, call_mark: harmony.Harmony(prompt_end),
    ),
    _thinks("gemma4", reasoning.GEMMA4, ("<|channel>", "<channel|>"), "<|channel>"),
    _thinks("mistral", reasoning.MISTRAL, reasoning.MISTRAL, "[THINK]"),
    _thinks("qwen3", reasoning.THINK, reasoning.THINK, "</think>"),
)
# value of --reasoning-parser -> format
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    **{one.name: one for one in _REASONING},
    "openai_gptoss": _REASONING[0],
    "glm45": _REASONING[-1],
    "deepseek_r1": ReasoningFormat(
        name="deepseek_r1",
        marks=("</think>",),
        special_tokens=reasoning.THINK,
        parser=lambda prompt_end, call_mark: ThinkTags(reasoning.THINK, begins_thinking=True, call_mark=call_mark),
    ),
}


@lru_cache
def call_format(option: str, template_source: str) -> CallFormat:
    """Return the format of tool calls.

    Args:
        option: A key of CALL_FORMATS, or "auto".
        template_source: The chat template, or "" if it takes no tools. One without known marks is taken as hermes.
    """
    if option != AUTO:
        return CALL_FORMATS[option]
    return next((one for one in _CALLS if all(mark in template_source for mark in one.marks)), _HERMES)


@lru_cache
def reasoning_format(option: str, template_source: str) -> ReasoningFormat | None:
    """Return the format of reasoning, or None if reasoning is left in the text.

    Args:
        option: A key of REASONING_FORMATS, "auto", or "none".
        template_source: The chat template.
    """
    if option == NONE:
        return None
    if option != AUTO:
        return REASONING_FORMATS[option]
    return next((one for one in _REASONING if all(mark in template_source for mark in one.marks)), None)
