"""Grammars for harmony, the message format of gpt-oss: a constraint holds after the header of its channel. Pure.

    (<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant)?
    <|channel|>final<|message|>ANSWER
    or <|channel|>commentary to=functions.f <|constrain|>json<|message|>ARGUMENTS

The model thinks first if it likes to. A call ends the answer, so there is one at most.
"""

from collections.abc import Callable, Mapping
from typing import Any

from shared.grammars import json_schema_grammar, lark_grammar, lark_text, lark_token
from shared.messages import Grammar


def in_channels(
    answer: Grammar | None, functions: Mapping[str, Mapping[str, Any]], special_id: Callable[[str], int | None]
) -> Grammar:
    """Return the grammar of a whole answer.

    Args:
        answer: Grammar of the content, or None if only calls are allowed.
        functions: Parameter schema of each function that may be called.
        special_id: Function from a text to the id of the special token with that text, or None.
    """

    def mark(text: str) -> str:
        token_id = special_id(text)
        return lark_text(text) if token_id is None else lark_token(token_id)

    channel, message = mark("<|channel|>"), mark("<|message|>")
    rules: dict[str, str | Grammar] = {
        "thought": f"{channel} {lark_text('analysis')} {message} TEXT {mark('<|end|>')} {mark('<|start|>')} "
        f"{lark_text('assistant')}",
        "TEXT": r"/[^<]*/" if special_id("<|end|>") is None else r"/(.|\n)*/",
    }
    endings = []
    if answer is not None:
        rules |= {"content": answer, "final": f"{channel} {lark_text('final')} {message} content"}
        endings.append("final")
    for index, (name, schema) in enumerate(functions.items()):
        recipient = lark_text(f"commentary to=functions.{name} ")
        header = f"{channel} {recipient} {mark('<|constrain|>')} {lark_text('json')} {message}"
        rules |= {
            f"arguments_{index}": json_schema_grammar(dict(schema)),
            f"call_{index}": f"{header} arguments_{index}",
        }
        endings.append(f"call_{index}")
    return lark_grammar({"start": f"thought? ({' | '.join(endings)})", **rules})
