"""What a message gains -> pieces of Anthropic's content blocks, in the order in which they come. Pure.

    blocks = MessageBlocks(shows_thoughts=True)
    for piece in blocks.pieces(reasoning, tool_calls, text): ...     piece.begins: another block than the one before
    content_blocks(pieces)                                           all of them, joined

A stream and a whole answer are made of the same pieces, so they say the same.

The last step but one of a token's way back at /v1/messages: gateway/parsing has told thoughts, calls and text apart,
and anthropic_response.py writes these pieces as events or as one body. It knows no tokens and no HTTP.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gateway.parsing.message import ToolCallDelta
from gateway.requests.anthropic_blocks import CALL_ID_PREFIX

# kind of block -> the field of its text, and the type of its deltas
_FIELDS = {
    "text": ("text", "text_delta"),
    "thinking": ("thinking", "thinking_delta"),
    "tool_use": ("partial_json", "input_json_delta"),
}


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Literal["text", "thinking", "tool_use"]
    text: str
    begins: bool
    call: ToolCallDelta | None = None  # where a call begins

    def start(self) -> dict[str, Any]:
        """Its block before it has any text."""
        if self.kind == "tool_use":
            assert self.call is not None and self.call.id is not None
            return {"type": self.kind, "id": CALL_ID_PREFIX + self.call.id, "name": self.call.name, "input": {}}
        # A signature would prove to Anthropic's servers that the thoughts are theirs.
        return {"type": self.kind, self.kind: ""} | ({"signature": ""} if self.kind == "thinking" else {})

    def delta(self) -> dict[str, str]:
        field, kind = _FIELDS[self.kind]
        return {"type": kind, field: self.text}


class MessageBlocks:
    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._open: str | None = None

    def pieces(self, reasoning: str, tool_calls: Sequence[ToolCallDelta], text: str) -> Iterator[Piece]:
        if reasoning and self._shows_thoughts:
            yield self._piece("thinking", reasoning)
        for call in tool_calls:
            yield self._piece("tool_use", call.arguments, call)
        if text:
            yield self._piece("text", text)

    def ending(self) -> Iterator[Piece]:
        """A message has one block at least."""
        if self._open is None:
            yield self._piece("text", "")

    def _piece(
        self, kind: Literal["text", "thinking", "tool_use"], text: str, call: ToolCallDelta | None = None
    ) -> Piece:
        begins = kind != self._open or (call is not None and call.id is not None)
        self._open = kind
        return Piece(kind, text, begins, call)


def content_blocks(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for piece in pieces:
        if piece.begins:
            blocks.append(piece.start())
            texts.append("")
        texts[-1] += piece.text
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
    return blocks


def _arguments(text: str) -> dict[str, Any]:
    """Nothing of a call that was cut: half an object is none, and the stop reason says why; nor of one without end."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
