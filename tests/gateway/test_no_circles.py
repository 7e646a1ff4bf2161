"""A request's memory is freed when it ends, without the cyclic garbage collector.

A collection that frees hundreds of requests stops the event loop for 20 to 40 ms, and until then each refused body
keeps its buffers.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.http.open_response import OpenResponse
from gateway.store.store_calls import QueueFull
from shared.messages import ErrorCode, ErrorEvent, GenerationRequest, StreamEvent, TokenEvent
from tests.gateway.auth.test_access import KEY, bearer, entry
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, says

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 4}
FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n%b\r\n--b--\r\n' % bytes(2**16)
FORM_TYPE = {"Content-Type": "multipart/form-data; boundary=b"}
OTHER_TYPE = {"Content-Type": "multipart/form-data; boundary=c"}  # the first request with a boundary fills a cache


def failing(request: GenerationRequest) -> Iterable[StreamEvent]:
    yield TokenEvent(request.request_id, 0, [5])
    yield ErrorEvent(request.request_id, ErrorCode.REQUEST_FAILED, "of its own")


@contextmanager
def left_in_circles() -> Iterator[Counter[str]]:
    """Count by type the objects of the gateway and of requests that are left in reference cycles.

    Objects that exist before are kept alive: aiohttp keeps the applications of the last 1,024 handlers, so any request
    may release the gateway of an earlier test, which is one large cycle.
    """
    left: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    before = gc.get_objects()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield left
        gc.collect()
        for thing in gc.garbage:
            if type(thing).__module__.startswith("gateway.") or isinstance(thing, web.BaseRequest | type):
                # a type: the standard library's mail parser creates three per header
                left[type(thing).__qualname__] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        before.clear()
        gc.enable()


async def status_of(gateway: Gateway, path: str, **sent: Any) -> int:
    sent["headers"] = bearer(KEY) | sent.get("headers", {})
    async with gateway.session.post(path, **sent) as reply:
        await reply.read()
        return reply.status


@pytest.mark.parametrize(
    ("path", "sent", "status"),
    [
        ("/v1/chat/completions", {"json": CHAT | {"stream": True}}, 200),
        ("/v1/chat/completions", {"json": CHAT | {"n": 2, "logprobs": True}}, 200),
        ("/v1/completions", {"json": {"prompt": ["the", "the"], "echo": True, "stream": True}}, 200),
        ("/v1/messages", {"json": CHAT | {"model": "tiny", "stream": True}}, 200),
        ("/v1/responses", {"json": {"input": "the", "stream": True}}, 200),
        ("/v1/chat/completions", {"json": CHAT | {"max_tokens": -1}}, 400),
        ("/v1/chat/completions", {"data": b"{" * 20_000, "headers": {"Content-Type": "application/json"}}, 400),
        ("/v1/files", {"data": FORM, "headers": FORM_TYPE}, 413),
        ("/v1/files", {"data": FORM.replace(b"--b", b"--c"), "headers": OTHER_TYPE}, 413),
    ],
)
async def test_answer_leaves_no_reference_cycles(
    start_gateway: Callable[..., Any], tmp_path: Path, path: str, sent: dict[str, Any], status: int
) -> None:
    (tmp_path / "keys.toml").write_text(entry("a", KEY))
    gateway = await start_gateway(
        FakeInferenceClient(says([5], [6])),
        api_keys_file=tmp_path / "keys.toml",
        files_dir=tmp_path / "files",
        max_files_bytes=2**15,
    )
    if sent.get("headers") != OTHER_TYPE:
        await status_of(gateway, path, **sent)  # created on first use
    with left_in_circles() as left:
        assert await status_of(gateway, path, **sent) == status
        await status_of(gateway, "/tokenize", json={"prompt": "the"})  # after this answer, the previous one has ended
    assert not left


@pytest.mark.parametrize(
    ("engine", "stream", "status"),
    [
        (FakeInferenceClient(failing), True, 200),
        (FakeInferenceClient(failing), False, 500),
        (FakeInferenceClient(), False, 503),
    ],
)
async def test_failed_request_leaves_no_reference_cycles(
    start_gateway: Callable[..., Any], engine: FakeInferenceClient, stream: bool, status: int
) -> None:
    if engine.script is None:
        engine.submit_error = QueueFull("as many as may wait")
    gateway = await start_gateway(engine)
    await status_of(gateway, "/v1/chat/completions", json=CHAT)
    with left_in_circles() as left:
        assert await status_of(gateway, "/v1/chat/completions", json=CHAT | {"stream": stream}) == status
        # the frames belong to the exception that it raised
        engine.submit_error = None if engine.script else QueueFull("a new one")
        await status_of(gateway, "/tokenize", json={"prompt": "the"})
    assert not left


async def test_client_that_left_leaves_no_reference_cycles(
    start_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(FakeInferenceClient(says([5], [6])))
    await status_of(gateway, "/v1/chat/completions", json=CHAT | {"stream": True})

    def push(response: OpenResponse, data: bytes) -> bool:  # the connection is lost only after it
        raise ConnectionResetError("the client has gone")

    monkeypatch.setattr(OpenResponse, "push", push)
    with left_in_circles() as left:
        with pytest.raises(aiohttp.ClientError):
            await status_of(gateway, "/v1/chat/completions", json=CHAT | {"stream": True})
        await status_of(gateway, "/tokenize", json={"prompt": "the"})
    assert not left
