"""A request body is decoded once. Every call of a JSON decoder is counted."""

import asyncio
import json as json_module
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from tests.gateway.batches.batch_clients import begun, client_of, ended, jsonl, line
from tests.gateway.conftest import IM_END, Gateway
from tests.gateway.fake_inference import FakeInferenceClient, says

ROOT = Path(__file__).parents[2]
HI = [{"role": "user", "content": "the end"}]
ONCE = Counter({"gateway/http/json_body.py::decode_body": 1})


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of JSON decoders by calling function of the gateway, on any thread started inside."""
    calls = Counter[str]()

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and _is_decoder(called):
            _count(frame)
        elif event == "call" and frame.f_code is json_module.loads.__code__ and frame.f_back is not None:
            _count(frame.f_back)

    def _count(frame: FrameType) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "gateway"):
            calls[f"{path.relative_to(ROOT)}::{frame.f_code.co_name}"] += 1

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _is_decoder(called: Any) -> bool:
    of_one = getattr(called, "__name__", "") == "decode" and isinstance(called.__self__, msgspec.json.Decoder)
    return of_one or called is msgspec.json.decode


def test_decoder_calls_are_counted() -> None:
    code = "import json, msgspec\njson.loads('1')\nmsgspec.json.decode('1')\nmsgspec.json.Decoder().decode('1')"
    compiled = compile(code, str(ROOT / "gateway" / "x.py"), "exec")
    with counted() as calls:
        exec(compiled)
    assert calls == {"gateway/x.py::<module>": 3}


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "mine"}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "x_new": {"a": 1}}),
        ("/v1/chat/completions", {"messages": HI, "stream": True, "detach_seconds": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the " * 5_000}], "max_tokens": 1}),
        ("/v1/completions", {"prompt": [[5], [5, 5]]}),
        ("/v1/responses", {"input": "the end"}),
        ("/v1/messages", {"model": "tiny", "messages": HI, "max_tokens": 5}),
    ],
)
async def test_request_body_is_decoded_once(
    start_gateway: Callable[..., Any], path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5, IM_END])))
    with counted() as calls:
        async with gateway.session.post(path, json=body, headers=headers) as reply:
            await reply.read()
    assert calls == ONCE


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/completions", {"prompt": "the end"}), ("/v1/responses", {"input": "hi", "prompt": None})],
)
async def test_batch_line_body_is_decoded_once(
    start_gateway: Callable[..., Any], tmp_path: Path, endpoint: str, body: dict[str, Any]
) -> None:
    num_lines = 3
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5, IM_END])), files_dir=tmp_path)
    lines = [line(f"{number}", endpoint, **body) for number in range(num_lines)]
    async with client_of(gateway) as client:
        content = jsonl(*lines)
        with counted() as calls:
            # The driver has already started threads, which are not counted.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
            batch = await ended(client, await begun(client, content, endpoint))
    assert batch.request_counts is not None and batch.request_counts.completed == num_lines
    of_requests = {name: count for name, count in calls.items() if name.startswith("gateway/http/")}
    create = 1  # the body that created the batch
    # Each line is read twice, to be checked and to be answered; its body is decoded in one of them only.
    names = 3 * num_lines  # custom_id, method, url
    assert of_requests == {
        "gateway/http/json_body.py::decode_body": num_lines + create,
        "gateway/http/json_body.py::_split": 2 * num_lines,
        "gateway/http/json_body.py::_value": 2 * names,
    }
    assert not [name for name in calls if name.startswith("gateway/pipeline/")]
