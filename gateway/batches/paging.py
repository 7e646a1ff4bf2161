"""`limit` and `after` of a list, and the page that they ask for. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.errors import InvalidRequest

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[_Item]):
    items: Sequence[_Item]
    has_more: bool


def page_of(items: Sequence[tuple[str, _Item]], query: Mapping[str, str], *, default: int, most: int) -> Page[_Item]:
    """`items`: each with its id, in the order of the list. Raises InvalidRequest."""
    limit = _limit(query.get("limit"), default, most)
    ids = [item_id for item_id, _ in items]
    begin = 0
    if after := query.get("after"):
        if after not in ids:
            raise InvalidRequest(f"after: {after[:100]!r} is not in this list.", param="after")
        begin = ids.index(after) + 1
    chosen = items[begin : begin + limit]
    return Page([item for _, item in chosen], has_more=begin + limit < len(items))


def _limit(text: str | None, default: int, most: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"limit: expected 1 to {most}; got {text[:40]!r}.", param="limit")
    return int(text)
