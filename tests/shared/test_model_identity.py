"""The identity of a queue's model: which files change it, and which workers REGISTER refuses."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.messages import ErrorEvent, decode_event_batch, decode_terminal_event
from shared.model_files import ModelFilesError
from shared.model_identity import (
    CONFIG_FILES,
    ModelDiffers,
    files_identity,
    refuse_other_model,
    served_identity,
    system_fingerprint,
    wait_for_match,
)
from shared.queue_clearing import CLEARED_MESSAGE, clear_queue
from shared.reaping import reap_worker
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand, RedisScripts

FIRST = served_identity({"config": "c1", "weights": "w1"}, quantization="none", dtype="float32", kv_dtype="float32")


def write_model(directory: Path, *, value: float = 0.0, size: int = 4096, name: str = "w") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    save_file({name: np.full(size, value, np.float32), "b": np.zeros(2, np.float32)}, directory / "model.safetensors")
    return directory


async def nobody() -> set[str]:
    return set()


async def first_worker() -> set[str]:
    return {"w0.a"}


class TestFiles:
    @pytest.mark.parametrize(
        "change",
        [
            lambda directory: write_model(directory, value=1.0),
            lambda directory: write_model(directory, size=4095),
            lambda directory: write_model(directory, name="v"),
        ],
    )
    def test_files_identity_other_tensors_change_weights(self, tmp_path: Path, change: Callable[[Path], Path]) -> None:
        before = files_identity(write_model(tmp_path))
        after = files_identity(change(tmp_path))
        assert (before["config"], before["weights"]) == (after["config"], before["weights"])
        assert before["weights"] != after["weights"]

    @pytest.mark.parametrize("name", CONFIG_FILES)
    def test_files_identity_config_file_changes_config(self, tmp_path: Path, name: str) -> None:
        before = files_identity(write_model(tmp_path))
        (tmp_path / "README.md").write_text("not part of a model")
        assert files_identity(tmp_path) == before
        (tmp_path / name).write_text('{"other": 1}')
        after = files_identity(tmp_path)
        assert after["weights"] == before["weights"] and after["config"] != before["config"]

    def test_files_identity_is_independent_of_sharding(self, tmp_path: Path) -> None:
        (tmp_path / "two").mkdir()
        one = files_identity(write_model(tmp_path / "one"))
        for name, size in (("w", 4096), ("b", 2)):
            save_file({name: np.zeros(size, np.float32)}, tmp_path / "two" / f"{name}.safetensors")
        assert files_identity(tmp_path / "two")["weights"] == one["weights"]

    def test_files_identity_dummy_weights_ignore_files(self, tmp_path: Path) -> None:
        assert files_identity(write_model(tmp_path), "dummy")["weights"] == "dummy:0"

    @pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0notjson!", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]"])
    def test_files_identity_broken_file_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelFilesError, match=r"model\.safetensors"):
            files_identity(tmp_path)

    def test_system_fingerprint_follows_each_field(self) -> None:
        others = [FIRST | {field: "other"} for field in FIRST]
        assert len({system_fingerprint(identity) for identity in (FIRST, *others)}) == 1 + len(FIRST)


@pytest.fixture
def scripts(connections: RedisConnections, keys: RedisKeys) -> RedisScripts:
    return RedisScripts(connections.commands, keys)


async def accept(scripts: RedisScripts, request_id: str = "a") -> None:
    await scripts.accept(request_id, b"body", gateway_id="g", priority_class="interactive")


class TestRegister:
    @pytest.mark.parametrize("field", FIRST)
    async def test_register_worker_with_other_model_is_refused(self, scripts: RedisScripts, field: str) -> None:
        await scripts.register("w0.a", FIRST)
        with pytest.raises(ModelDiffers, match=rf"{field} {FIRST[field]}, and this one has {field} other") as refused:
            await scripts.register("w1.a", FIRST | {field: "other"})
        assert refused.value.is_certain({"w0.a"}) and not refused.value.is_certain(set())
        assert not await scripts.redis.exists(scripts.keys.fence("w1.a"))
        assert (await scripts.take("w0.a", Demand(1))).entries == []

    async def test_register_same_model_joins(self, scripts: RedisScripts) -> None:
        for worker_id in ("w0.a", "w1.a"):
            await scripts.register(worker_id, FIRST)

    async def test_register_empty_queue_accepts_other_model(self, scripts: RedisScripts) -> None:
        other = FIRST | {"dtype": "bfloat16"}
        await scripts.register("w0.a", FIRST)
        await reap_worker(scripts, "w0.a")
        await scripts.register("w1.a", other)
        with pytest.raises(ModelDiffers, match="dtype bfloat16"):
            await scripts.register("w0.b", FIRST)

    async def test_register_waiting_requests_keep_the_model(self, scripts: RedisScripts) -> None:
        await scripts.register("w0.a", FIRST)
        await accept(scripts)
        await scripts.take("w0.a", Demand(1))
        await reap_worker(scripts, "w0.a")
        with pytest.raises(ModelDiffers, match="1 requests wait for it: run `pagestream queue clear") as refused:
            await scripts.register("w1.a", FIRST | {"weights": "w2"})
        assert refused.value.is_certain(set())

    async def test_compare_identity_writes_nothing(self, scripts: RedisScripts) -> None:
        await scripts.compare_identity(FIRST)
        await scripts.register("w0.a", FIRST)
        await reap_worker(scripts, "w0.a")
        await scripts.compare_identity(FIRST | {"weights": "w2"})
        assert (await scripts.redis.hgetall(scripts.keys.model))[b"weights"] == b"w1"

    async def test_register_without_identity_is_not_compared(self, scripts: RedisScripts) -> None:
        await scripts.register("w0.a", FIRST)
        await scripts.register("old.a")
        assert (await scripts.redis.hgetall(scripts.keys.model))[b"weights"] == b"w1"


class TestWaiting:
    async def test_wait_for_match_waits_for_silent_worker(self, scripts: RedisScripts) -> None:
        await scripts.register("w0.a", FIRST)
        other = FIRST | {"dtype": "bfloat16"}
        waiting = asyncio.create_task(wait_for_match(lambda: scripts.register("w1.a", other), nobody, 60.0))
        await reap_worker(scripts, "w0.a")
        await waiting
        assert (await scripts.redis.hgetall(scripts.keys.model))[b"dtype"] == b"bfloat16"

    async def test_wait_for_match_live_worker_is_refused_at_once(self, scripts: RedisScripts) -> None:
        await scripts.register("w0.a", FIRST)
        other = FIRST | {"dtype": "bfloat16"}
        async with asyncio.timeout(30):
            with pytest.raises(ModelDiffers):
                await wait_for_match(lambda: scripts.register("w1.a", other), first_worker, 3600.0)
            with pytest.raises(ModelDiffers):
                await refuse_other_model(lambda: scripts.compare_identity(other), first_worker)


async def test_clear_queue_ends_each_waiting_request(scripts: RedisScripts, connections: RedisConnections) -> None:
    await scripts.register("w0.a", FIRST)
    for request_id in "abc":
        await accept(scripts, request_id)
    held = (await scripts.take("w0.a", Demand(1))).entries
    await scripts.claim("w0.a", held)
    async with connections.subscriber.pubsub() as channel:
        await channel.subscribe(scripts.keys.gateway_channel("g"))
        await channel.get_message(timeout=5.0)
        assert await clear_queue(scripts.redis, scripts.keys) == 2
        messages = [await channel.get_message(ignore_subscribe_messages=True, timeout=5.0) for _ in range(2)]
    events = [event for message in messages for event in decode_event_batch(message["data"]).events]
    assert [(event.request_id, event.message) for event in events if isinstance(event, ErrorEvent)] == [
        ("b", CLEARED_MESSAGE),
        ("c", CLEARED_MESSAGE),
    ]
    stored: Any = await scripts.redis.hget(scripts.keys.request("b"), "terminal")
    assert decode_terminal_event(stored) == events[0]
    assert await scripts.redis.hget(scripts.keys.request("a"), "state") == b"running"  # unaffected: its worker lives
    assert await clear_queue(scripts.redis, scripts.keys) == 0
