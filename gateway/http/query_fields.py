"""Fields of a URL's query -> values, or an error that names the field and what was allowed; pages of lists. Pure.

Beside the walks: routes that read read their queries by it. It knows no route, and nothing of what is listed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

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


def asked_page(query: Mapping[str, str], *, default: int, most: int) -> Asked:
    """Raises InvalidRequest."""
    limit = query_number(query, "limit", 1, most)
    return Asked(default if limit is None else limit, query.get("after") or None)


def page_of(
    kind: Callable[..., msgspec.Struct], found: Sequence[_Item] | None, asked: Asked, shown: Callable[[_Item], Any]
) -> bytes:
    """The page as JSON. `kind`: its form; `found`: one more than was asked for, if there are so many; None if `after`
    is not in the list; `shown`: an entry as clients see it.

    Raises InvalidRequest.
    """
    if found is None:
        raise InvalidRequest(f"after: {(asked.after or '')[:100]!r} is not in this list.", param="after")
    data = [shown(item) for item in found[: asked.limit]]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    page = kind(data=data, first_id=first_id, last_id=last_id, has_more=len(found) > asked.limit)
    return msgspec.json.encode(page)
