"""A retained request is charged to its API key while it is generated, also without a connected client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.engine_worker.worker_harness import FOREVER_STEPS
from tests.integration.conftest import COMPLETIONS, Gateway, World
from tests.integration.test_kept_requests import GREEDY, write_keys
from tests.patience import PATIENCE_SECONDS

KEY = "sk-one-0123456789abcdef"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@asynccontextmanager
async def limited(world: World, model: Path, tmp_path: Path, limit: str) -> AsyncIterator[Gateway]:
    keys_file = write_keys(tmp_path, {"one": KEY})
    keys_file.write_text(f"{keys_file.read_text()}\n{limit}\n")
    async with world.another_gateway(model, api_keys_file=keys_file) as gateway:
        yield gateway


async def left(gateway: Gateway, body: dict[str, Any]) -> str:
    """Start a stream, disconnect, and return its id."""
    async with gateway.streaming(COMPLETIONS, {**body, "stream": True}, **HEADERS) as reader:
        return reader.request_id


async def code(gateway: Gateway, body: dict[str, Any], **headers: str) -> str | None:
    _, shown = await gateway.post(COMPLETIONS, body, **HEADERS, **headers)
    return shown["error"]["code"] if "error" in shown else None


async def eventually(gateway: Gateway, body: dict[str, Any], expected: str | None) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await code(gateway, body) != expected:
            await asyncio.sleep(0.01)


async def test_detached_request_keeps_its_reserve(world: World, demo_model_dir: Path, tmp_path: Path) -> None:
    async with limited(world, demo_model_dir, tmp_path, "tokens_per_minute = 100") as gateway:
        request_id = await left(gateway, {**GREEDY, "max_tokens": 500})
        for _ in range(3):
            assert await code(gateway, GREEDY) == "tokens_per_minute_exceeded"
        status, shown = await gateway.shown(request_id, **HEADERS)  # reading the state is free
        assert (status, shown["state"]) in ((200, "queued"), (200, "running"))
        assert (await gateway.shown(request_id, "DELETE", **HEADERS))[0] == 200
        world.worker.gate.allow(FOREVER_STEPS)
        await eventually(gateway, GREEDY, None)


async def test_max_concurrent_queues_further_requests(world: World, demo_model_dir: Path, tmp_path: Path) -> None:
    """The scheduler applies the limit, so the gateway refuses nothing."""
    async with limited(world, demo_model_dir, tmp_path, "max_concurrent = 1") as gateway:
        await left(gateway, GREEDY)
        second = asyncio.create_task(code(gateway, GREEDY))
        world.worker.gate.allow(FOREVER_STEPS)
        assert await second is None


async def test_detached_request_is_charged_for_its_tokens(world: World, demo_model_dir: Path, tmp_path: Path) -> None:
    async with limited(world, demo_model_dir, tmp_path, "tokens_per_minute = 40") as gateway:
        request_id = await left(gateway, {**GREEDY, "max_tokens": 60})
        world.worker.gate.allow(FOREVER_STEPS)
        # Reading the result is also charged. Reading the state of a running request, cancelling, and counting are free.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await gateway.shown(request_id, **HEADERS))[0] == 200:
                await asyncio.sleep(0.01)
        assert await code(gateway, {**GREEDY, "max_tokens": 1}) == "tokens_per_minute_exceeded"
        assert (await gateway.shown(request_id, **HEADERS))[0] == 429
        async with gateway.session.get(f"/v1/requests/{request_id}/events", headers=HEADERS) as reply:
            assert reply.status == 429
        assert (await gateway.post("/tokenize", {"prompt": "Hi"}, **HEADERS))[0] == 200


async def test_reading_a_result_again_is_charged(world: World, demo_model_dir: Path, tmp_path: Path) -> None:
    world.worker.gate.allow(FOREVER_STEPS)
    async with limited(world, demo_model_dir, tmp_path, "requests_per_minute = 4\ntokens_per_minute = 70") as gateway:
        _, made = await gateway.post(COMPLETIONS, GREEDY, **HEADERS)
        assert (await gateway.shown(made["id"], **HEADERS))[0] == 200
        assert (await gateway.shown(made["id"], **HEADERS))[0] == 200
        _, refused = await gateway.shown(made["id"], **HEADERS)
        assert refused["error"]["code"] == "tokens_per_minute_exceeded"
        _, refused = await gateway.shown(made["id"], **HEADERS)
        assert refused["error"]["code"] == "requests_per_minute_exceeded"
