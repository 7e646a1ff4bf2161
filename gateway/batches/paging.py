"""`limit` and `after` of a list. Pure.

Beside the walks: the lists of files and of batches are cut by it. It knows nothing of what is listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.errors import InvalidRequest

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Asked:
    limit: int
    after: str | None


@dataclass(frozen=True, slots=True)
class Page(Generic[_Item]):
    items: Sequence[_Item]
    has_more: bool


def asked_page(query: Mapping[str, str], *, default: int, most: int) -> Asked:
    """Raises InvalidRequest."""
    return Asked(_limit(query.get("limit"), default, most), query.get("after") or None)


def page_of(found: Sequence[_Item] | None, asked: Asked) -> Page[_Item]:
    """`found`: one more than was asked for, if there are so many; None if `after` is not in the list.

    Raises InvalidRequest.
    """
    if found is None:
        raise InvalidRequest(f"after: {(asked.after or '')[:100]!r} is not in this list.", param="after")
    return Page(found[: asked.limit], has_more=len(found) > asked.limit)


def _limit(text: str | None, default: int, most: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"limit: expected 1 to {most}; got {text[:40]!r}.", param="limit")
    return int(text)
