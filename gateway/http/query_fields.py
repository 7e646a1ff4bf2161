"""Fields of a URL's query -> values, or an error that names the field and what was allowed; pages of lists. Pure.

Beside the walks: routes that read read their queries by it. It knows no route, and nothing of what is listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.errors import InvalidRequest

_FLAGS = {"true": True, "false": False}


def query_flag(query: Mapping[str, str], name: str) -> bool:
    """False if it is absent. Raises InvalidRequest."""
    return _FLAGS[query_choice(query, name, tuple(_FLAGS), "false")]


def query_choice(query: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    """Raises InvalidRequest."""
    given = query.get(name, default)
    if given not in choices:
        raise InvalidRequest(f"{name}: expected {' or '.join(choices)}; got {given[:40]!r}.", param=name)
    return given


def query_number(query: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    """None if it is absent. Raises InvalidRequest."""
    given = query.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) <= 12 and least <= int(given) <= most):
        raise InvalidRequest(f"{name}: expected {least} to {most}; got {given[:40]!r}.", param=name)
    return int(given)


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
    limit = query_number(query, "limit", 1, most)
    return Asked(default if limit is None else limit, query.get("after") or None)


def page_of(found: Sequence[_Item] | None, asked: Asked) -> Page[_Item]:
    """`found`: one more than was asked for, if there are so many; None if `after` is not in the list.

    Raises InvalidRequest.
    """
    if found is None:
        raise InvalidRequest(f"after: {(asked.after or '')[:100]!r} is not in this list.", param="after")
    return Page(found[: asked.limit], has_more=len(found) > asked.limit)
