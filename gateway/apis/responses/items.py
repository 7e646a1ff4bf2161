"""The items of one response in API form: output items as tokens arrive, and input items. Pure.

    output = OutputItems(response_id, EventWriter())
    output.reason(text) · output.call(delta) · output.say(text, logprobs)   -> bytes of events, maybe none
    output.close("completed")                                               -> the end of the open item
    input_items(items, answer_id, ...)                                      -> GET /v1/responses/{id}/input_items

A new item begins when the kind of output changes, so items keep the order in which the model wrote them. The events of
an item: output_item.added, for texts content_part.added, deltas, the whole text, content_part.done, output_item.done.
Whole answers are built from the same items.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from gateway.pipeline.response_format import NOTHING, json_text, one_line
from gateway.text.logprobs import LogprobEntry, chat_logprobs, event_logprobs
from gateway.text.long_json import LongArray, json_pieces
from gateway.text.parsers.message import ToolCallDelta

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "compaction": "cmp"
}  # fmt: skip
_NO_LOGPROBS = b'"logprobs":[],'
_encode = msgspec.json.encode


class EventWriter:
    """Numbers the events of a stream from 0."""

    def __init__(self) -> None:
        self._next_number = 0

    def event(self, kind: str, **content: Any) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        data = lines_of({"type": kind, **content, "sequence_number": number})
        return b"".join((b"event: ", kind.encode(), b"\ndata: ", data, b"\n\n"))

    def delta(self, head: bytes, text: str) -> bytes:
        """`head`: of delta_head(), and further fields. The rest of the object is not encoded again for every token."""
        number, self._next_number = self._next_number, self._next_number + 1
        return b'%b"sequence_number":%d,"delta":%b}\n\n' % (head, number, json_text(text))

    @staticmethod
    def delta_head(kind: str, **content: Any) -> bytes:
        return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **content})[:-1] + b","


class _OpenItem:
    """The item that grows. `place`: what its events say of where it is; `text_kind`: what their names call its text."""

    def __init__(self, item: dict[str, Any], place: dict[str, Any], text_kind: str) -> None:
        self.item = item
        self.kind = item["type"]
        self.place = place
        self.text_kind = text_kind
        self.delta_head = EventWriter.delta_head(f"response.{text_kind}.delta", **place)
        self.pieces: list[str] = []
        self.scores, self.scores_of_events = LongArray(), LongArray()  # of a message, in the form of each
        self.call_index: int | None = None


class OutputItems:
    def __init__(
        self, response_id: str, writer: EventWriter, namespaced: Mapping[str, tuple[str, str]] = NOTHING
    ) -> None:
        """Create the output of one response; `namespaced`: function in the chat -> (namespace, name) of its tool."""
        self._namespaced = namespaced
        self.items: list[dict[str, Any]] = []  # those that are whole
        self._response_id = response_id
        self._writer = writer
        self._open: _OpenItem | None = None
        self._held_logprobs: list[LogprobEntry] = []  # of tokens that have no text yet

    def reason(self, text: str) -> bytes:
        self._held_logprobs.clear()
        opened, events = self._texts(REASONING)
        opened.pieces.append(text)
        return events + self._writer.delta(opened.delta_head, text)

    def say(self, text: str, logprobs: Sequence[LogprobEntry] = ()) -> bytes:
        """Log-probabilities without a text are those of the next one, unless the model thinks or calls."""
        opened = self._open
        if not text and opened is not None and opened.kind != MESSAGE:
            return b""
        self._held_logprobs += logprobs
        if not text:
            return b""
        events = b""
        if opened is None or opened.kind != MESSAGE:
            opened, events = self._texts(MESSAGE)
        opened.pieces.append(text)
        head = self._scored_head(opened) if self._held_logprobs else opened.delta_head + _NO_LOGPROBS
        return events + self._writer.delta(head, text)

    def say_nothing(self) -> bytes:
        """Open an empty message if the answer has no item."""
        return b"" if self.items or self._open else self._texts(MESSAGE)[1]

    def call(self, call: ToolCallDelta) -> bytes:
        self._held_logprobs.clear()
        opened, events = self._open, b""
        if opened is None or opened.call_index != call.index:
            opened, events = self._begin(CALL, call_id=call.id, **self._function(call.name or ""), arguments="")
            opened.call_index = call.index
        if not call.arguments:
            return events
        opened.pieces.append(call.arguments)
        return events + self._writer.delta(opened.delta_head, call.arguments)

    def _function(self, chat_name: str) -> dict[str, str]:
        if chat_name not in self._namespaced:
            return {"name": chat_name}
        namespace, name = self._namespaced[chat_name]
        return {"name": name, "namespace": namespace}

    def close(self, status: str) -> bytes:
        """`status`: completed | incomplete, of the item that is open."""
        opened = self._open
        if opened is None:
            return b""
        events = b""
        if opened.kind == MESSAGE and self._held_logprobs:
            events = self._writer.delta(self._scored_head(opened), "")
        events += self._whole_text(opened)
        opened.item["status"] = status
        self._open = None
        self.items.append(opened.item)
        index = opened.place["output_index"]
        return events + self._writer.event("response.output_item.done", output_index=index, item=opened.item)

    def _texts(self, kind: str) -> tuple[_OpenItem, bytes]:
        if self._open is not None and self._open.kind == kind:
            return self._open, b""
        fields: dict[str, Any] = {"role": "assistant"} if kind == MESSAGE else {"summary": []}
        opened, events = self._begin(kind, **fields, content=[])
        part = _part(kind, "", LongArray())
        return opened, events + self._writer.event("response.content_part.added", **opened.place, part=part)

    def _begin(self, kind: str, **fields: Any) -> tuple[_OpenItem, bytes]:
        """Open an item. Its id is the same at every gateway that sends this answer."""
        closed, index = self.close("completed"), len(self.items)
        item = {"id": f"{_PREFIXES[kind]}_{self._response_id}{index:04x}", "type": kind, **fields}
        item["status"] = "in_progress"
        added = self._writer.event("response.output_item.added", output_index=index, item=item)
        place = {"item_id": item["id"], "output_index": index}
        if kind == CALL:
            opened = _OpenItem(item, place, "function_call_arguments")
        else:
            text_kind = "output_text" if kind == MESSAGE else "reasoning_text"
            opened = _OpenItem(item, {**place, "content_index": 0}, text_kind)
        self._open = opened
        return opened, closed + added

    def _scored_head(self, message: _OpenItem) -> bytes:
        """Return the head of a delta with the held log-probabilities, which are added to the message."""
        logprobs, self._held_logprobs = self._held_logprobs, []
        encoded = _encode(event_logprobs(logprobs))
        message.scores_of_events.extend(encoded)
        message.scores.extend(_encode(chat_logprobs(logprobs)["content"]))
        return b'%b"logprobs":%b,' % (message.delta_head, one_line(encoded))

    def _whole_text(self, opened: _OpenItem) -> bytes:
        text, done = "".join(opened.pieces), f"response.{opened.text_kind}.done"
        if opened.kind == CALL:
            opened.item["arguments"] = text
            return self._writer.event(done, **opened.place, name=opened.item["name"], arguments=text)
        part = _part(opened.kind, text, opened.scores)
        opened.item["content"] = [part]
        scores = {"logprobs": opened.scores_of_events} if opened.kind == MESSAGE else {}
        events = self._writer.event(done, **opened.place, text=text, **scores)
        return events + self._writer.event("response.content_part.done", **opened.place, part=part)


def lines_of(value: Any) -> bytearray:
    """`value` as JSON in one line, put together in pieces: it may have all log-probabilities of an answer."""
    data = bytearray()
    for piece in json_pieces(value):
        data += one_line(bytes(piece))
    return data


def _part(kind: str, text: str, scores: LongArray) -> dict[str, Any]:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


class InputItemsBody(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str  # empty for an empty list
    last_id: str
    has_more: bool


def input_items(
    items: Sequence[dict[str, Any]], answer_id: str, *, limit: int, newest_first: bool, after: str | None
) -> dict[str, Any]:
    """Return a page of items, as InputItemsBody describes it, that starts after the item with the id `after`."""
    shown = [shown_item(item, f"{answer_id}i{index:04x}") for index, item in enumerate(items)]
    if newest_first:
        shown.reverse()
    places = [place for place, item in enumerate(shown) if item["id"] == after]
    rest = shown[places[0] + 1 :] if places else shown
    data = rest[:limit]
    first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else ("", "")
    return {
        "object": "list", "data": data, "first_id": first_id, "last_id": last_id, "has_more": len(rest) > limit
    }  # fmt: skip


def shown_item(item: dict[str, Any], name: str) -> dict[str, Any]:
    """With what a client may leave out: an id, a status, a type, and parts for a text."""
    kind = item.get("type") or "message"
    known = {"id": item.get("id") or f"{_PREFIXES[kind]}_{name}", "type": kind}
    if kind == "message":
        known |= {"content": _parts(item["content"], item["role"])}
    if kind in ("message", "function_call", "function_call_output"):
        known |= {"status": item.get("status") or "completed"}
    return {**item, **known}


def _parts(content: str | list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [_shown_part(part, kind) for part in parts]


def _shown_part(part: dict[str, Any], kind: str) -> dict[str, Any]:
    if part["type"] == "refusal":
        return part
    annotations = {"annotations": part.get("annotations") or []} if kind == "output_text" else {}
    return {**part, "type": kind, **annotations}
