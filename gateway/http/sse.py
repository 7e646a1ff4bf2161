"""Server-Sent Events in OpenAI's form. Pure.

OpenAI's routes use no `event:` names; each event is one line of JSON, and `[DONE]` is last. An error after the headers
is an event of its own, never a silent end. Comments keep idle connections alive; every client ignores them.
"""

from typing import Any

import msgspec

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # else nginx buffers the stream
}


def event(data: bytes) -> bytes:
    """Return an event; `data` must be one line, as JSON is."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, content: dict[str, Any]) -> bytes:
    """Return an event with a name, as in Anthropic's API and OpenAI's Responses API."""
    return b"event: " + name.encode() + b"\n" + event(msgspec.json.encode(content))


def error_event(body: dict[str, Any]) -> bytes:
    return event(msgspec.json.encode(body))


DONE = event(b"[DONE]")
KEEP_ALIVE = b": keep-alive\n\n"
