"""What came into a response, item by item, as GET /v1/responses/{id}/input_items lists it. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "compaction": "cmp"
}  # fmt: skip


class InputItemsBody(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str  # empty for an empty list
    last_id: str
    has_more: bool


def input_items(
    items: Sequence[dict[str, Any]], answer_id: str, *, limit: int, newest_first: bool, after: str | None
) -> dict[str, Any]:
    """A page of them, as InputItemsBody has it. `after`: the id of the last item of the page before."""
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
    return [_part(part, kind) for part in parts]


def _part(part: dict[str, Any], kind: str) -> dict[str, Any]:
    if part["type"] == "refusal":
        return part
    annotations = {"annotations": part.get("annotations") or []} if kind == "output_text" else {}
    return {**part, "type": kind, **annotations}
