"""One streamed completion as bytes, with minimal work per token, so that thousands run in one client process.

Events are parsed after the load.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

MAX_HEAD_BYTES = 65_536


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    error: object = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class RawStream:
    sent_at: float = 0.0  # time.monotonic, like all times here
    answered_at: float = 0.0  # arrival of the response head
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # (arrival, bytes)
    failure: str = ""

    def events(self) -> tuple[str, list[tuple[float, str]], bool]:
        """Return (request id, (arrival, text) of each token, whether [DONE] arrived).

        There may be one more event than tokens, for an unfinished character at the end.
        """
        request_id, tokens, done, pending = "", [], False, b""
        for arrived_at, piece in self.pieces:
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    chunk = _decode(line[6:])
                    if chunk.error is not None:
                        self.failure = str(chunk.error)[:200]
                    request_id = chunk.id.partition("-")[2] or request_id
                    tokens += [(arrived_at, choice.text) for choice in chunk.choices if not choice.finish_reason]
        return request_id, tokens, done


async def open_stream(
    host: str, port: int, body: dict[str, object], stream: RawStream, *, headers: Mapping[str, str] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the request and return after the response head.

    Raises:
        OSError: If the connection fails.
    """
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD_BYTES)
    stream.sent_at = time.monotonic()
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    reply = await reader.readuntil(b"\r\n\r\n")
    stream.answered_at = time.monotonic()
    stream.status = int(reply.split(b" ", 2)[1])
    return reader, writer


async def read_stream(host: str, port: int, body: dict[str, object]) -> RawStream:
    """Read a stream to its end; errors of the server or the network are part of the result."""
    stream = RawStream()
    try:
        reader, writer = await open_stream(host, port, body, stream)
        while piece := await reader.read(65_536):
            stream.pieces.append((time.monotonic(), piece))
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        stream.failure = f"{type(error).__name__}: {error}"
    return stream
