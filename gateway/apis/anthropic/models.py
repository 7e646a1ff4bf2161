"""Models in Anthropic's format, on URLs that OpenAI's API has too."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.errors import InvalidRequest
from gateway.http.query_fields import query_number

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000  # Anthropic's


def show_model(name: str, started_at: int, max_model_len: int | None) -> dict[str, Any]:
    """Return a model in Anthropic's format; `created_at` is the gateway's start, as release dates are unknown."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def list_models(infos: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the models after `after_id`, or the last ones before `before_id`. Raise InvalidRequest."""
    limit = query_number(query, "limit", 1, MAX_LIMIT) or DEFAULT_LIMIT
    after, before = _place(infos, query, "after_id"), _place(infos, query, "before_id")
    there = infos[0 if after is None else after + 1 : before]
    chosen = there[:limit] if before is None else there[-limit:]
    return {
        "data": list(chosen),
        "has_more": len(there) > limit,
        "first_id": chosen[0]["id"] if chosen else None,
        "last_id": chosen[-1]["id"] if chosen else None,
    }


def _place(infos: Sequence[Mapping[str, Any]], query: Mapping[str, str], name: str) -> int | None:
    given = query.get(name)
    if not given:
        return None
    for index, info in enumerate(infos):
        if info["id"] == given:
            return index
    raise InvalidRequest(f"{name}: {given[:100]!r} is not a model of this list.", param=name)
