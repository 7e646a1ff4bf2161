"""A failed owner task ends the gateway process. A failed message or stream ends only itself."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.serving.free_port import free_port
from gateway.fleet import Fleet
from gateway.store.inbox import Inbox
from gateway.store.inference_client import InferenceClient
from gateway.work.background import BackgroundWork
from gateway.work.owner_tasks import OwnerTasks
from shared.messages import ErrorCode, ErrorEvent, TokenEvent, WorkerHeartbeat, WorkerPhase, encode
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.store_errors import StoreRefused
from tests.builders import make_request
from tests.conftest import Valkey
from tests.gateway.batches.batch_clients import KEYS, write_keys
from tests.gateway.conftest import Gateway
from tests.inbox_reader import InboxReader
from tests.patience import PATIENCE_SECONDS

OWNERS = {
    "listening": "gateway.store.listening:Listening.run",
    "recovery": "gateway.store.recovery:Recovery.run",
    "fleet_clock": "shared.fleet_clock:FleetClock.run",
    "store_memory": "gateway.store.store_probe:StoreMemory.watch",
    "store_history": "gateway.store.store_probe:StoreHistory.watch",
    "serving_rate": "gateway.store.serving_rate:ServingRate.watch",
    "store_primary": "shared.redis_client:RedisConnections.follow_primary",
    "limits": "gateway.store.shared_limits:SharedLimits.share",
    "kv_watch": "gateway.store.kv_watch:KVWatch.run",
    "load_models": "gateway.model_service:ModelService.load",
    "stream_watch": "gateway.http.open_response:StreamWatch.run",
    "key_watch": "gateway.auth.access:Access.watch",
    "freed_memory": "gateway.freed_memory:FreedMemory.watch",
    "files_upkeep": "gateway.apis.files.directory:FilesDirectory.run",
    "settle": "gateway.http.state:GatewayState.keep_reader_ready",
}
# A separate program: the gateway, with one of its coroutines replaced by one that fails.
PROGRAM = """
import importlib, sys, time
target, end, *arguments = sys.argv[1:]
module, _, path = target.partition(":")
class_name, _, method = path.partition(".")

async def fail(*_):
    sys.stderr.write(f"ended at {time.monotonic()}\\n")
    if end == "raise":
        raise RuntimeError("planned")

setattr(getattr(importlib.import_module(module), class_name), method, fail)
from gateway.__main__ import main
sys.exit(main(arguments))
"""


def run_gateway(directory: Path, model: Path, url: str, owner: str, end: str) -> tuple[int, str, float]:
    """Return exit status, log, and the seconds between the end of the task and of the process."""
    flags = ["--model", str(model), "--port", str(free_port()), "--redis-url", url, "--files-dir", str(directory / "f")]
    flags += ["--api-keys-file", str(write_keys(directory / "keys.toml", *list(KEYS)[:1]))]
    argv = [sys.executable, "-c", PROGRAM, OWNERS[owner], end, *flags]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        _, log = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    ended_at = float(log.partition("ended at ")[2].partition("\n")[0])
    return process.returncode, log, time.monotonic() - ended_at


@pytest.mark.parametrize("owner", [owner for owner in OWNERS if owner != "settle"])
def test_owner_task_that_raises_ends_the_process(
    tmp_path: Path, tiny_model_dir: Path, valkey: Valkey, owner: str
) -> None:
    status, log, seconds = run_gateway(tmp_path, tiny_model_dir, valkey.url, owner, "raise")
    assert status == 1 and f"owner task {owner}: failed: " in log and "planned" in log
    assert seconds < 1.0


def test_owner_task_that_returns_ends_the_process(tmp_path: Path, tiny_model_dir: Path, valkey: Valkey) -> None:
    status, log, seconds = run_gateway(tmp_path, tiny_model_dir, valkey.url, "listening", "return")
    assert status == 1 and "owner task listening: ended early" in log
    assert seconds < 1.0


def test_failed_preparation_ends_the_process(tmp_path: Path, tiny_model_dir: Path, valkey: Valkey) -> None:
    status, log, seconds = run_gateway(tmp_path, tiny_model_dir, valkey.url, "settle", "raise")
    assert status == 1 and "owner task settle: failed: " in log
    assert seconds < 1.0


async def test_livez_fails_with_an_owner_task(gateway: Gateway) -> None:
    async def fail() -> None:
        raise RuntimeError("planned")

    gateway.state.owners.start("listening", fail())
    await gateway.state.owners.failed.wait()
    async with gateway.session.get("/livez") as answer:
        assert (answer.status, await answer.json()) == (503, {"state": "failed"})
    assert gateway.metric("pagestream_owner_task_up", task="listening") == 0.0
    assert gateway.metric("pagestream_owner_task_up", task="stream_watch") == 1.0


async def test_cancelled_owner_task_is_no_failure() -> None:
    owners = OwnerTasks()
    task = owners.start("listening", asyncio.sleep(PATIENCE_SECONDS))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert not owners.failed.is_set()


async def test_end_of_a_task_that_may_return_is_no_failure() -> None:
    owners = OwnerTasks()
    await owners.start("settle", asyncio.sleep(0), may_return=lambda: True)
    await asyncio.sleep(0)
    assert not owners.failed.is_set()


async def test_refusing_store_does_not_restart_the_gateway() -> None:
    async def fail() -> None:
        raise StoreRefused("the store is a read-only replica; give the address of the primary")

    owners = OwnerTasks()
    owners.start("fleet_clock", fail())
    await owners.failed.wait()
    assert owners.is_refused


async def test_failed_background_work_is_counted() -> None:
    async def fail() -> None:
        raise RuntimeError("planned")

    num_errors = 0

    def count() -> None:
        nonlocal num_errors
        num_errors += 1

    work = BackgroundWork(count)
    work.start(fail())
    work.detach(fail())
    await asyncio.sleep(0)
    await work.finish()
    assert num_errors == 2


class TestOneOfMany:
    """Two streams of one message, or one message of several: one handler raises."""

    @pytest.fixture
    async def client(self, connections: RedisConnections, keys: RedisKeys) -> AsyncIterator[InferenceClient]:
        client = InferenceClient(connections, keys, "g", quiet_seconds=0.02)
        self.owners = OwnerTasks()
        await client.start(self.owners)
        yield client
        assert not self.owners.failed.is_set()
        await client.close()

    async def test_stream_that_fails_ends_alone(self, client: InferenceClient, monkeypatch: pytest.MonkeyPatch) -> None:
        good, bad = [await client.submission.submit(make_request(3)) for _ in range(2)]
        break_method(monkeypatch, bad, "add_event")
        await client._listening._deliver([TokenEvent(one.request_id, 0, [5]) for one in (bad, good)])
        assert await anext(InboxReader(good)) == TokenEvent(good.request_id, 0, [5])
        end = await anext(InboxReader(bad))
        assert isinstance(end, ErrorEvent) and end.code is ErrorCode.REQUEST_FAILED
        assert client.counts.num_message_errors == 1

    async def test_journal_that_fails_ends_only_its_stream(
        self, client: InferenceClient, connections: RedisConnections, keys: RedisKeys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        good, bad = [await client.submission.submit(make_request(3)) for _ in range(2)]
        break_method(monkeypatch, bad, "add_journal")
        end = await anext(InboxReader(bad))
        assert isinstance(end, ErrorEvent) and end.code is ErrorCode.REQUEST_FAILED
        assert not good.has_ended and client.counts.num_message_errors == 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await connections.commands.exists(keys.request(bad.request_id)):
                await asyncio.sleep(0.01)  # the request is cancelled in the store

    async def test_heartbeat_that_fails_is_counted(
        self, client: InferenceClient, connections: RedisConnections, keys: RedisKeys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Fleet, "record_heartbeat", broken)
        beat = WorkerHeartbeat(worker_id="w", phase=WorkerPhase.READY)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not client.counts.num_message_errors:
                await connections.commands.publish(keys.heartbeat_channel, encode(beat))
                await asyncio.sleep(0.01)


def broken(*_: object) -> None:
    raise ArithmeticError("planned")


def break_method(monkeypatch: pytest.MonkeyPatch, bad: Inbox, name: str) -> None:
    """Let a method of one stream fail."""
    method = getattr(Inbox, name)
    monkeypatch.setattr(Inbox, name, lambda one, *given: broken() if one is bad else method(one, *given))
