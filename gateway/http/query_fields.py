"""Typed values from a URL's query, with errors that name the parameter and its allowed values; pages of lists. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from gateway.errors import InvalidRequest

_FLAGS = {"true": True, "false": False}


def query_flag(query: Mapping[str, str], name: str) -> bool:
    """Return true or false; False if the parameter is absent. Raise InvalidRequest for any other value."""
    return _FLAGS[query_choice(query, name, tuple(_FLAGS), "false")]


def query_choice(query: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    """Return one of `choices`; `default` if the parameter is absent. Raise InvalidRequest for any other value."""
    given = query.get(name, default)
    if given not in choices:
        raise InvalidRequest(f"{name}: expected {' or '.join(choices)}; got {given[:40]!r}.", param=name)
    return given


def query_number(query: Mapping[str, str], name: str, minimum: int, maximum: int) -> int | None:
    """Return an integer from `minimum` to `maximum`; None if the parameter is absent.

    Raises:
        InvalidRequest: For any other value.
    """
    given = query.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) <= 12 and minimum <= int(given) <= maximum):
        raise InvalidRequest(f"{name}: expected {minimum} to {maximum}; got {given[:40]!r}.", param=name)
    return int(given)


_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class PageQuery:
    limit: int
    after: str | None


def page_query(query: Mapping[str, str], *, default: int, max_limit: int) -> PageQuery:
    """Return `limit` (1 to `max_limit`, else `default`) and `after` of a list request. Raise InvalidRequest."""
    limit = query_number(query, "limit", 1, max_limit)
    return PageQuery(default if limit is None else limit, query.get("after") or None)


def page_of(
    kind: Callable[..., msgspec.Struct], found: Sequence[_Item] | None, query: PageQuery, shown: Callable[[_Item], Any]
) -> bytes:
    """Return one page of a list as JSON.

    Args:
        kind: The type of the page.
        found: The items of the page, and one more if there is a next page; None if `after` is not in the list.
        query: The requested page.
        shown: Converts an item to its form in the API.

    Raises:
        InvalidRequest: If `found` is None.
    """
    if found is None:
        raise InvalidRequest(f"after: {(query.after or '')[:100]!r} is not in this list.", param="after")
    data = [shown(item) for item in found[: query.limit]]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    page = kind(data=data, first_id=first_id, last_id=last_id, has_more=len(found) > query.limit)
    return msgspec.json.encode(page)
