"""Fields of a URL's query -> values, or an error that names the field and what was allowed. Pure.

Beside the walks: routes that read read their queries by it. It knows no route.
"""

from collections.abc import Mapping, Sequence

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
