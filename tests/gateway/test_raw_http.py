"""Raw HTTP that no client library sends. Each case has its status, and a concurrent stream stays unchanged."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from gateway.http.json_body import MAX_BODY_BYTES
from gateway.text.served_model import ServedModel
from shared.messages import TokenEvent
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import finish, says
from tests.gateway.test_routes_inference import read_events
from tests.patience import PATIENCE_SECONDS

BODY = b'{"prompt":"canary","max_tokens":2}'
SIZE = b"%d" % len(BODY)
LENGTH = b"Content-Length: " + SIZE
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
POST = b"POST /v1/completions HTTP/1.1"
HOST = b"Host: 127.0.0.1"


def post(*headers: bytes, body: bytes = BODY, host: bytes = HOST, line: bytes = POST) -> bytes:
    head = [line, host, b"Connection: close", b"Content-Type: application/json", *headers]
    return b"\r\n".join(part for part in head if part) + b"\r\n\r\n" + body


def typed(media_type: bytes) -> bytes:
    return post(LENGTH).replace(b"application/json", media_type)


def chunked(body: bytes) -> bytes:
    return post(CHUNKED, body=body)


def get(target: bytes, method: bytes = b"GET", host: bytes = HOST) -> bytes:
    return method + b" " + target + b" HTTP/1.1\r\n" + host + b"\r\nConnection: close\r\n\r\n"


CASES: dict[str, tuple[int, bytes]] = {
    "valid request": (200, post(LENGTH)),
    # length and encoding: no server may disagree about where a request ends
    "two lengths": (400, post(LENGTH, b"Content-Length: 5")),
    "the same length twice": (400, post(LENGTH, LENGTH)),
    "a list of lengths": (400, post(LENGTH + b", " + SIZE)),
    "negative length": (400, post(b"Content-Length: -1")),
    "signed length": (400, post(b"Content-Length: +" + SIZE)),
    "hexadecimal length": (400, post(b"Content-Length: 0x22")),
    "length with a space": (400, post(b"Content-Length: 3 4")),
    "empty length": (400, post(b"Content-Length:")),
    "length of 30 digits": (400, post(b"Content-Length: " + b"9" * 30)),
    "length beyond the limit": (413, post(b"Content-Length: %d" % (MAX_BODY_BYTES + 1))),
    "length and chunks": (400, post(LENGTH, CHUNKED, body=CHUNKS)),
    "two encodings": (400, post(CHUNKED, b"Transfer-Encoding: identity", body=CHUNKS)),
    "unknown encoding": (400, post(b"Transfer-Encoding: xchunked", body=CHUNKS)),
    "compressed chunks": (415, post(b"Transfer-Encoding: gzip, chunked", body=CHUNKS)),
    "chunks not last": (400, post(b"Transfer-Encoding: chunked, identity", body=CHUNKS)),
    "space before the colon of the encoding": (400, post(b"Transfer-Encoding : chunked", body=CHUNKS)),
    # chunked bodies
    "chunks": (200, chunked(CHUNKS)),
    "chunk with an extension": (200, chunked(b"%x;a=b\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))),
    "chunk with an extension of 1 MB": (200, chunked(b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(BODY), b"a" * 2**20, BODY))),
    "10,000 chunks of one byte": (200, chunked(b"1\r\n \r\n" * 10**4 + CHUNKS)),
    "chunks beyond the limit": (413, chunked((b"10000\r\n" + b" " * 65536 + b"\r\n") * 33 + b"0\r\n\r\n")),
    "chunk of 2^68 bytes": (400, chunked(b"fffffffffffffffff\r\n" + BODY)),
    "chunk of -1 bytes": (400, chunked(b"-1\r\n" + BODY)),
    "chunk of 0x bytes": (400, chunked(b"0x22\r\n" + BODY + b"\r\n0\r\n\r\n")),
    "chunk size is not a number": (400, chunked(b"zz\r\n" + BODY)),
    "chunk without end": (400, chunked(b"%x\r\n%sXX0\r\n\r\n" % (len(BODY), BODY))),
    "chunks with bare line feeds": (400, chunked(b"%x\n%s\n0\n\n" % (len(BODY), BODY))),
    "trailer": (200, chunked(b"%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(BODY), BODY))),
    "trailer of 20 kB": (400, chunked(b"%x\r\n%s\r\n0\r\nX: %s\r\n\r\n" % (len(BODY), BODY, b"y" * 20_000))),
    # request lines and headers
    "bare line feeds": (400, post(LENGTH).replace(b"\r\n", b"\n")),
    "bare carriage return": (400, post(LENGTH).replace(b"\r\n", b"\r", 2)),
    "folded header": (400, post(LENGTH, b"X: a\r\n b")),
    "NUL in a header": (400, post(LENGTH, b"X: a\0b")),
    "key with a NUL": (400, post(LENGTH, b"Authorization: Bearer canary\0")),
    "key in a folded header": (400, post(LENGTH, b"X: a\r\n Authorization: Bearer canary")),
    "key in a path": (400, get(b"/canary\xff")),
    "NUL in a name": (400, post(LENGTH, b"X\0: a")),
    "control character": (400, post(LENGTH, b"X: \x07")),
    "space in a name": (400, post(LENGTH, b"X y: a")),
    "no colon": (400, post(LENGTH, b"Xy")),
    "empty name": (400, post(LENGTH, b": a")),
    "space before a colon": (400, post(LENGTH, b"X : a")),
    "header of 9 kB": (400, post(LENGTH, b"X: " + b"a" * 9000)),
    "200 headers": (400, post(LENGTH, *[b"X%d: y" % number for number in range(200)])),
    "40,000 headers": (400, post(LENGTH, *[b"X%d: y" % number for number in range(40_000)])),
    "target of 9 kB": (400, post(LENGTH, line=b"POST /" + b"a" * 9000 + b" HTTP/1.1")),
    "query of 9 kB": (400, post(LENGTH, line=b"POST /v1/completions?" + b"a" * 9000 + b" HTTP/1.1")),
    "no host": (400, post(LENGTH, host=b"")),
    "two hosts": (400, post(LENGTH, HOST)),
    "two different hosts": (400, post(LENGTH, b"Host: evil.example")),
    "host with a path": (403, post(LENGTH, host=b"Host: evil.example/?")),
    "other host": (403, post(LENGTH, host=b"Host: evil.example")),
    # bodies
    "gzip": (415, post(LENGTH, b"Content-Encoding: gzip")),
    "gzip in gzip": (415, post(LENGTH, b"Content-Encoding: gzip, gzip")),
    "deflate": (415, post(LENGTH, b"Content-Encoding: deflate")),
    "x-gzip": (415, post(LENGTH, b"Content-Encoding: x-gzip")),
    "brotli": (415, post(LENGTH, b"Content-Encoding: br")),
    "identity": (200, post(LENGTH, b"Content-Encoding: identity")),
    "expect 100-continue": (100, post(LENGTH, b"Expect: 100-continue")),
    "expect something else": (417, post(LENGTH, b"Expect: tea")),
    "expect is not text": (417, post(LENGTH, b"Expect: \xff\xfe")),
    "expect on an unknown path": (417, get(b"/nothing", host=HOST + b"\r\nExpect: \xff")),
    "expect with a star": (417, get(b"*", b"OPTIONS", host=HOST + b"\r\nExpect: \xff")),
    "type of 256 characters": (200, typed(b"application/json" + b";" * 240)),
    "type of 257 characters": (415, typed(b"application/json" + b";" * 241)),
    "type of 8 kB": (415, typed(b"application/json" + b";" * 8000)),
    "two types": (400, post(LENGTH, b"Content-Type: multipart/form-data; boundary=x")),
    "body of a GET": (200, get(b"/v1/models").replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\nhello")),
    # protocols and methods
    "HTTP/0.9": (200, b"GET /livez\r\n\r\n"),
    "HTTP/1.0": (200, post(LENGTH, line=b"POST /v1/completions HTTP/1.0")),
    "HTTP/1.2": (400, post(LENGTH, line=b"POST /v1/completions HTTP/1.2")),
    "HTTP/3.0": (400, post(LENGTH, line=b"POST /v1/completions HTTP/3.0")),
    "lowercase http": (400, post(LENGTH, line=b"POST /v1/completions http/1.1")),
    "HTTP/2 preface": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n"),
    "SSH": (400, b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    "every byte": (400, bytes(range(256)) + b"\r\n\r\n"),
    "upgrade to a web socket": (200, post(LENGTH, b"Upgrade: websocket").replace(b"close", b"close, Upgrade")),
    "unknown method": (400, post(LENGTH, line=b"FOO /v1/completions HTTP/1.1")),
    "lowercase method": (400, post(LENGTH, line=b"post /v1/completions HTTP/1.1")),
    "method by a header": (200, post(LENGTH, b"X-HTTP-Method-Override: DELETE")),
    "TRACE": (405, get(b"/v1/models", b"TRACE")),
    "CONNECT": (404, get(b"evil.example:80", b"CONNECT")),
    "OPTIONS": (405, get(b"/v1/models", b"OPTIONS")),
    # paths
    "dots": (404, get(b"/ui/../../etc/passwd")),
    "encoded dots": (404, get(b"/ui/%2e%2e%2f%2e%2e%2fapp.py")),
    "backslash": (404, get(b"/ui/..\\app.py")),
    "NUL in a path": (404, get(b"/ui/app.js%00.html")),
    "bad escape": (404, get(b"/%zz")),
    "invalid UTF-8": (404, get(b"/%ff%fe")),
    "bytes in a path": (400, get(b"/\xff\xfe")),
    "another host in the path": (404, get(b"//evil.example/%2e%2e")),
    "path without a slash": (400, get(b"v1/models")),
    "space in a path": (400, get(b"/v1/ models")),
}  # fmt: skip


async def status_of(port: int, data: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        line = await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        return int(line.split()[1]) if line else 0
    finally:
        writer.close()


async def test_raw_request_has_its_status_and_a_stream_is_unchanged(
    gateway: Gateway, tiny_model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    characters = "".join(chr(ord("a") + number % 26) for number in range(len(CASES)))
    async with gateway.session.post("/v1/completions", json={"prompt": "hi", "stream": True}) as response:
        stream = await gateway.engine.next_stream()
        reading = asyncio.create_task(read_events(response))
        gateway.engine.script = says([5])
        got = {}
        for index, (name, (_, data)) in enumerate(CASES.items()):
            token_ids = tiny_model.encoder.encode_text(characters[index])
            stream.send(TokenEvent(stream.request.request_id, index, token_ids))
            got[name] = await status_of(gateway.port, data)
        stream.send(finish(stream.request, len(CASES)))
        events = await reading
    assert got == {name: status for name, (status, _) in CASES.items()}
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == characters
    assert "canary" not in caplog.text  # nor in a traceback


ROUND_ABOUT = [
    b"//v1/models", b"/v1//models", b"/v1/./models", b"/livez/../v1/models", b"/livez/%2e%2e/v1/models",
    b"/livez%2f..%2fv1/models", b"/%76%31/models", b"/v1/models/", b"/v1/models?/livez", b"/v1/models#/livez",
    b"/livez/v1/models", b"/livez;/v1/models", b"http://127.0.0.1/v1/models", b"http://evil.example/livez/../v1/models",
    b"/readyz/../metrics", b"/metrics/", b"//metrics", b"/LIVEZ/../metrics", b"/livez%00/../metrics", b"/v1/models%20",
    b"/\\v1/models", b"/openapi.json", b"/debug/kv/stream", b"/",
]  # fmt: skip


async def test_no_url_spelling_bypasses_the_key(start_gateway: Callable[..., Any]) -> None:
    gateway: Gateway = await start_gateway(api_key="ps-0123456789abcdef")
    got = {
        (target, host): await status_of(gateway.port, get(target, host=host))
        for target in ROUND_ABOUT
        for host in (HOST, b"Host: evil.example/livez?", b"Host: 127.0.0.1/livez#", b"Host: livez")
    }
    assert {key: status for key, status in got.items() if status not in (400, 401)} == {}


async def test_key_that_is_not_text_is_refused(start_gateway: Callable[..., Any]) -> None:
    gateway: Gateway = await start_gateway(api_key="ps-0123456789abcdef")
    long = b"Authorization: Bearer " + b"k" * 4000
    for header in (b"Authorization: Bearer \xff\xfe", b"x-api-key: \xed\xa0\x80", long):
        assert await status_of(gateway.port, post(LENGTH, header)) == 401


async def test_hundred_pipelined_requests_are_answered(gateway: Gateway) -> None:
    gateway.engine.script = says([5])
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    one = post(LENGTH).replace(b"Connection: close\r\n", b"")
    writer.write(one * 99 + post(LENGTH))
    answers = await asyncio.wait_for(reader.read(-1), PATIENCE_SECONDS)
    writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 100


async def test_request_smuggled_into_a_body_is_body(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    inner = post(LENGTH)
    writer.write(post(b"Content-Length: %d" % len(inner), body=inner))
    answers = await asyncio.wait_for(reader.read(-1), PATIENCE_SECONDS)
    writer.close()
    assert answers.count(b"HTTP/1.1 ") == 1 and b"400 Bad Request" in answers
    assert gateway.engine.requests == []


async def test_clients_that_leave_or_stall_delay_nobody(gateway: Gateway) -> None:
    """Disconnect at every tenth byte, and by reset. 200 clients send one byte and wait; others are answered at once."""
    gateway.engine.script = says([5])
    whole = post(LENGTH)
    for end in range(0, len(whole), 10):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(whole[:end])
        if end % 20:
            writer.transport.abort()
        writer.close()
    waiting = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(200)]
    for _, writer in waiting:
        writer.write(b"P")
    assert await status_of(gateway.port, whole) == 200
    for _, writer in waiting:
        writer.close()
    assert await status_of(gateway.port, whole) == 200
