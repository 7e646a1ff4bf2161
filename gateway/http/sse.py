"""Server-Sent Events as OpenAI streams them: bytes only. Pure.

No `event:` names on OpenAI's routes; one line of JSON an event; `[DONE]` last. An error after the headers is an event
of its own, never a silent end. Comments keep idle connections alive and are skipped by every client.

A token's way back, in its last steps: formats write by it. It knows no connection.
"""

from typing import Any

import msgspec

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the stream
}


def event(data: bytes) -> bytes:
    """`data` is one line: JSON escapes every line break."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, content: dict[str, Any]) -> bytes:
    """As other APIs than OpenAI's have them."""
    return b"event: " + name.encode() + b"\n" + event(msgspec.json.encode(content))


def error_event(body: dict[str, Any]) -> bytes:
    return event(msgspec.json.encode(body))


DONE = event(b"[DONE]")
KEEP_ALIVE = b": keep-alive\n\n"
