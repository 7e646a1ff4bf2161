"""The worker process: its heartbeats during startup."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine_worker.execution.settings import ExecutionSettings
from engine_worker.metrics import EngineInfo
from engine_worker.scheduling.settings import SchedulingSettings
from engine_worker.service import LoadedEngine, Report, WorkerService
from engine_worker.settings import WorkerSettings
from shared.messages import WorkerPhase, decode_heartbeat
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.subscription import GAP, Message, Subscription
from tests.builders import make_engine
from tests.conftest import Valkey


def load(report: Report) -> LoadedEngine:
    info = EngineInfo(
        device="cpu",
        dtype="float32",
        kv_cache_dtype="bfloat16",
        quantization="none",
        block_size_bytes=0,
        max_model_len=64,
        memory_bytes=dict,
    )
    return LoadedEngine(make_engine(), info)


async def test_service_ready_is_published_before_next_heartbeat(
    valkey: Valkey, connections: RedisConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_tick(_seconds: float) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("engine_worker.service.next_tick", no_tick)  # leaves only the first timed heartbeat
    settings = WorkerSettings(
        execution=ExecutionSettings(model=Path("m")),
        scheduling=SchedulingSettings(),
        redis_url=valkey.url,
        metrics_port=0,
    )
    heartbeats = Subscription(connections.subscriber, [RedisKeys("m").heartbeat_channel])
    while await heartbeats.get(1.0) is not GAP:
        continue
    serving = asyncio.create_task(WorkerService(settings, "1").run(load))
    phases: list[WorkerPhase] = []
    while WorkerPhase.READY not in phases:
        if isinstance(message := await heartbeats.get(1.0), Message):
            phases.append(decode_heartbeat(message.data).phase)
    assert len(phases) <= 2
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    await heartbeats.aclose()
