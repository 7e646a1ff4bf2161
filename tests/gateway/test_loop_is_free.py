"""While hostile bodies of 2 MiB are read, as requests and as batch lines, other requests are answered."""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.http.json_body import MAX_BODY_BYTES
from tests.gateway.batches.batch_clients import ENDPOINT, client_of, ended
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, finish
from tests.gateway.requests.test_json_structure import SHAPES

# CPU seconds, which do not depend on other processes: 0.1 s, half of it used by this process's own client.
# At 2 MiB, a backtracking pattern takes hours.
STILL_SECONDS = 2.0
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize")


@asynccontextmanager
async def others_stay_answered(gateway: Gateway, still_seconds: float = STILL_SECONDS) -> AsyncIterator[None]:
    """Check that probes, like a kubelet's, are answered within a small amount of CPU time of this process."""
    waits: list[float] = []

    async def probe() -> None:
        due = time.process_time()
        while True:
            async with gateway.session.get("/livez") as answer:
                assert answer.status == 200
            now = time.process_time()
            waits.append(now - due)
            due = now  # counts from here: the test shares the blocked loop
            await asyncio.sleep(0.01)

    probing = asyncio.create_task(probe())
    yield
    await asyncio.sleep(0.02)
    assert not probing.done() or probing.result() is None
    probing.cancel()
    assert waits and max(waits) < still_seconds


async def start(start_gateway: Callable[..., Any], directory: Path) -> Gateway:
    engine = FakeInferenceClient()
    engine.script = lambda request: [finish(request, 0)]
    gateway: Gateway = await start_gateway(engine, files_dir=directory)
    return gateway


async def test_hostile_request_does_not_block_others(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway = await start(start_gateway, tmp_path)
    headers = {"Content-Type": "application/json"}
    async with others_stay_answered(gateway):
        for number, shape in enumerate(SHAPES.values()):
            body = await asyncio.to_thread(shape, MAX_BODY_BYTES)
            url = URLS[number % len(URLS)]
            async with gateway.session.post(url, data=io.BytesIO(body), headers=headers) as answer:
                assert answer.status < 500, await answer.text()


async def test_hostile_batch_line_does_not_block_others(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    """Include resumption: a stored line that stops one gateway would stop its successor as well."""
    head = b'{"custom_id":"%d","method":"POST","url":"' + ENDPOINT.encode() + b'","body":'
    shapes = [shape(MAX_BODY_BYTES - 100) for name, shape in SHAPES.items() if name != "UTF-16"]
    lines = [head % number + body + b"}" for number, body in enumerate(shapes)]
    first = await start(start_gateway, tmp_path)
    async with client_of(first) as client, others_stay_answered(first):
        uploads = [await client.files.create(file=(f"{number}.jsonl", line), purpose="batch") for number, line in
                   enumerate([*lines, b"\n".join(lines)])]  # fmt: skip
        first.state.open_requests.draining = True  # the next gateway finds what is created now
        created = [
            await client.batches.create(input_file_id=upload.id, endpoint=ENDPOINT, completion_window="24h")
            for upload in uploads
        ]
    second = await start(start_gateway, tmp_path)
    async with client_of(second) as client, others_stay_answered(second):
        for batch in created:
            assert (await ended(client, batch)).status in ("failed", "completed")


async def test_blocked_probe_is_detected(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway = await start(start_gateway, tmp_path)
    failed = False
    try:
        async with others_stay_answered(gateway, still_seconds=0.5):
            await asyncio.sleep(0.1)
            ends = time.process_time() + 0.6
            while time.process_time() < ends:  # a blocked loop
                pass
            await asyncio.sleep(0.1)
    except AssertionError:
        failed = True
    assert failed
