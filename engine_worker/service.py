"""Runs a worker process: loading, health routes, heartbeats, reaping, and the Worker itself.

Health routes, heartbeats, and phase lines start at once, while the engine is loaded in its thread. `load` returns the
engine: a model on a device, or a script in a test. A failure of any part ends the process.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from redis.exceptions import RedisError

from engine_worker.engine import Engine
from engine_worker.engine_thread import EngineThread
from engine_worker.exit_reaper import ExitReaper
from engine_worker.grammar_gate import Compile
from engine_worker.health import HealthServer, PortUnavailable
from engine_worker.metrics import EngineInfo, WorkerMetrics
from engine_worker.request_spans import RequestSpans
from engine_worker.request_times import RequestClock, TimesSink
from engine_worker.settings import WorkerSettings
from engine_worker.status import WorkerStatus
from engine_worker.transport.control_messages import listen
from engine_worker.transport.fault_counts import FaultCounts
from engine_worker.transport.heartbeat import BEAT_SECONDS, HeartbeatPublisher
from engine_worker.transport.incarnation import Incarnation, register
from engine_worker.transport.kv_feed import KVFeed
from engine_worker.transport.presence import Presence
from engine_worker.transport.reaper import Reaper
from engine_worker.transport.worker_profile import WorkerProfile
from engine_worker.watchdog import EXIT_CODE_HUNG, StepWatchdog, dump_stacks
from engine_worker.worker import Worker
from shared.capabilities import Abilities
from shared.fleet_clock import FleetClock
from shared.live_workers import LiveWorkers
from shared.messages import WorkerPhase
from shared.model_identity import (
    ModelDiffers,
    refuse_other_model,
    served_identity,
    system_fingerprint,
    wait_for_match,
)
from shared.reaping import reap_worker
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts
from shared.tasks import run_until_first_ends
from shared.ticks import next_tick
from shared.tracing import TracingUnavailable, open_tracing

logger = logging.getLogger("worker")

SELF_FENCE_RATIO = 2 / 3  # of --dead-after-seconds: the worker must have stopped before peers take its requests
HAND_OVER_SECONDS = 1.0  # for a failed worker to requeue its requests; then peers do it after missed heartbeats
EXIT_LOST = 1  # the same as for any failed worker
LAST_SECONDS = 2.0  # for the event loop to end the worker after the loss of a process
REAP_SECONDS = 2.0  # from the missed heartbeats of a dead worker until its requests are queued again
STATS_TIMEOUT_SECONDS = 0.5  # during a long step the last snapshot is shown


@dataclass(frozen=True)
class LoadedEngine:
    engine: Engine
    info: EngineInfo
    compile_grammar: Compile | None = None
    note: str = ""  # detail of the phase `ready`
    dump_others: Callable[[], None] | None = None  # makes the other processes of this worker write their stacks
    set_on_end: Callable[[Callable[[str], None]], None] | None = None  # registers a callback, which runs in a thread
    start: dict[int, list[tuple[str, float]]] = field(default_factory=dict)  # by rank: phases and their seconds


class LostProcess(Exception):
    """Another process of this worker has ended; the message names it and the cause."""


class CannotStart(Exception):
    """Settings, model, and machine do not fit together; the message names the fix."""


Report = Callable[[str, float, str], None]  # phase, progress 0..1, detail
LoadEngine = Callable[[Report], LoadedEngine]  # runs in the engine's thread


class WorkerService:
    """One worker process."""

    def __init__(self, settings: WorkerSettings, version: str) -> None:
        """Create the parts. Requires a running event loop. Raises CannotStart."""
        base_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self._settings = settings
        self._base_id = base_id
        self._keys = RedisKeys(settings.model_name, settings.store_namespace)
        self._connections = connect(settings.redis_url, hash_tag=self._keys.hash_tag)
        self._engine = EngineThread()
        self._status = WorkerStatus(base_id, version)
        scripts = RedisScripts(self._connections.commands, self._keys)
        self._presence = Presence(scripts, self._incarnation_id, settings.dead_after_seconds)
        self._fleet_clock = FleetClock(self._presence.tick)
        self._faults = FaultCounts()
        self._metrics = WorkerMetrics(
            base_id,
            settings.model_name,
            version,
            self._status,
            self._faults,
            vllm_names=settings.vllm_metric_names,
        )
        self._heartbeats = HeartbeatPublisher(self._connections.commands, self._keys, faults=self._faults)
        self._sinks: list[TimesSink] = [self._metrics]
        try:
            self._tracing = open_tracing(settings.otlp_traces_endpoint, "pagestream-worker")
        except TracingUnavailable as error:
            raise CannotStart(str(error)) from error
        if self._tracing is not None:
            self._sinks.append(RequestSpans(self._tracing, base_id, settings.model_name))
        is_group = settings.execution.tensor_parallel_size > 1
        self._exit_reaper = ExitReaper(settings.redis_url, self._keys) if is_group else None
        self._reaper = Reaper(
            self._connections,
            self._keys,
            self._presence,
            faults=self._faults,
        )
        self._identity: dict[str, str] = {}  # of the served model
        self._watchdog = StepWatchdog(self._engine, settings.step_timeout_seconds, self._end_hung)
        self._worker: Worker | None = None
        self._note = ""
        self._dump_others: Callable[[], None] | None = None
        self._stop_requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._ending: asyncio.Task[None] | None = None

    async def run(self, load: LoadEngine, files_identity: Callable[[], dict[str, str]] = dict) -> None:
        """Serve until SIGTERM or SIGINT; a second signal ends the process at once.

        Args:
            load: Returns the engine. It runs in the engine's thread.
            files_identity: Returns the model identity known before loading; empty: not compared.

        Raises:
            CannotStart: If settings, model, and machine do not fit together.
        """
        self._handle_signals()
        health = HealthServer(self._status, self._metrics, self._refresh_stats, self._engine)
        try:
            async with health.listen(self._settings.metrics_host, self._settings.metrics_port) as port:
                logger.info("metrics on http://%s:%d/metrics", self._settings.metrics_host, port)
                await run_until_first_ends(
                    self._load_and_serve(load, files_identity),
                    self._until_lost(),
                    self._heartbeats.run(),
                    self._fleet_clock.run(),
                    self._connections.follow_primary(),
                    self._beat_each_second(),
                    self._reaper.run(),
                    KVFeed(
                        self._connections.commands,
                        self._keys,
                        self._loaded_engine,
                        lambda: self._status.worker_id,
                        lambda: self._worker.tenants() if self._worker else {},
                    ).run(),
                    self._watchdog.run(),
                )
        except (PortUnavailable, ModelDiffers) as error:
            raise CannotStart(str(error)) from error
        except Exception:
            await self._hand_over()
            raise
        finally:
            await self._connections.aclose()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    async def _load_and_serve(self, load: LoadEngine, files_identity: Callable[[], dict[str, str]]) -> None:
        files = await self._compare_files(files_identity)
        loaded = await self._load(load)
        if loaded is not None:
            self._identify(files, loaded.info)
            await self._serve(loaded)

    async def _compare_files(self, files_identity: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Compare the model's files with the queue's model, before loading. Raises ModelDiffers and CannotStart."""
        try:
            files = await asyncio.to_thread(files_identity)
        except (ValueError, OSError) as error:
            raise CannotStart(str(error)) from error
        if files:
            scripts = RedisScripts(self._connections.commands, self._keys)
            try:
                await refuse_other_model(partial(scripts.compare_identity, files), LiveWorkers(scripts).ids)
            except (RedisError, OSError) as error:
                logger.warning("model identity: not compared before loading: %s", error)
        return files

    def _identify(self, files: dict[str, str], info: EngineInfo) -> None:
        if files:
            self._identity = served_identity(
                files, quantization=info.quantization, dtype=info.dtype, kv_dtype=info.kv_cache_dtype
            )
            self._status.fingerprint = system_fingerprint(self._identity)

    async def _load(self, load: LoadEngine) -> LoadedEngine | None:
        """Load the engine. None: a stop was requested; native code may still run in the thread."""
        loading = asyncio.create_task(self._engine.call(partial(load, self._status.report)))
        stopped = asyncio.create_task(self._stop_requested.wait())
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            loading.cancel()
            return None
        try:
            return loading.result()
        except ValueError as error:  # the loader raises it for a model or a setting that it cannot serve
            logger.debug("loading failed", exc_info=True)
            raise CannotStart(str(error)) from error

    async def _serve(self, loaded: LoadedEngine) -> None:
        self._metrics.engine_is_ready(loaded.info)
        self._status.max_model_len = loaded.info.max_model_len
        self._status.max_num_seqs = loaded.engine.max_num_seqs
        # In a group, the thread of rank 0 also spins while it waits for other ranks.
        self._watchdog.is_cpu = loaded.info.device == "cpu" and self._settings.execution.tensor_parallel_size == 1
        self._note = loaded.note
        self._dump_others = loaded.dump_others
        if loaded.set_on_end is not None:
            loaded.set_on_end(self._lose_process)
        worker = Worker(
            self._engine,
            self._register,
            partial(listen, self._connections, self._keys),
            self._metrics,
            self._settings.drain_seconds,
            RequestClock(self._sinks),
        )
        self._engine.start(loaded.engine, worker.take_turn, loaded.compile_grammar)
        self._worker = worker
        if self._stop_requested.is_set():
            worker.drain()
        await worker.run()
        await self._engine.stop()

    async def _until_lost(self) -> None:
        await self._lost

    def _lose_process(self, what: str) -> None:
        """End this process: orderly, or at once if its event loop hangs. May be called in any thread."""
        logger.critical("group: %s; all ranks end", what)
        self._loop.call_soon_threadsafe(self._lost.set_exception, LostProcess(what))
        threading.Event().wait(LAST_SECONDS)
        os._exit(EXIT_LOST)

    async def _hand_over(self) -> None:
        """Requeue this worker's requests after a failure, so that peers need not wait for missed heartbeats."""
        worker_id = self._incarnation_id()
        if not worker_id:
            return  # this worker never served
        try:
            async with asyncio.timeout(HAND_OVER_SECONDS):
                summary = await reap_worker(RedisScripts(self._connections.commands, self._keys), worker_id)
            logger.warning("worker %s: failed; requeued its requests: %s", worker_id, summary)
        except (RedisError, OSError, TimeoutError) as error:
            logger.warning(
                "worker %s: requeue failed; peers will requeue after missed heartbeats: %s", worker_id, error
            )

    def _end_hung(self) -> None:
        """Write the stacks, requeue the requests, and exit, because a step hangs."""
        if self._ending is None:
            dump_stacks(self._dump_others)
            self._ending = self._loop.create_task(self._hand_over_and_exit())

    async def _hand_over_and_exit(self) -> None:
        """Exit with os._exit(), because a hung thread would block the interpreter's shutdown."""
        try:
            await self._hand_over()
        finally:
            sys.stderr.flush()
            os._exit(EXIT_CODE_HUNG)

    async def _register(self, previous: Incarnation | None) -> Incarnation:
        attempt = partial(
            register,
            self._connections,
            self._keys,
            self._base_id,
            previous,
            fleet_clock=self._fleet_clock,
            faults=self._faults,
            self_fence_seconds=SELF_FENCE_RATIO * self._settings.dead_after_seconds,
            profile=WorkerProfile(
                self._identity,
                Abilities(max_model_len=self._status.max_model_len),
                has_peers=lambda: self._presence.has_peers,
            ),
        )
        patience_seconds = self._settings.dead_after_seconds + REAP_SECONDS
        live_workers = LiveWorkers(RedisScripts(self._connections.commands, self._keys))
        incarnation = await wait_for_match(attempt, live_workers.ids, patience_seconds)
        self._status.worker_id = incarnation.worker_id
        if self._exit_reaper is not None:
            self._exit_reaper.watch(incarnation.worker_id)
        self._metrics.incarnation_began()
        self._status.report(
            WorkerPhase.DRAINING if self._stop_requested.is_set() else WorkerPhase.READY, 1.0, self._note
        )
        await self._beat()  # saves gateways that wait for a worker 0.5 s on average
        return incarnation

    def _incarnation_id(self) -> str:
        """Return "" before the first registration."""
        return "" if self._status.worker_id == self._base_id else self._status.worker_id

    async def _beat_each_second(self) -> None:
        while True:
            await self._beat()
            self._status.remind()
            await next_tick(BEAT_SECONDS)

    async def _beat(self) -> None:
        await self._refresh_stats()
        self._heartbeats.set_latest(self._status.heartbeat(self._engine.num_steps, in_step=self._engine.in_step))

    async def _refresh_stats(self) -> None:
        if self._worker is None:
            return
        try:
            self._status.stats = await asyncio.wait_for(self._engine.stats(), STATS_TIMEOUT_SECONDS)
        except TimeoutError:
            logger.debug("stats: the engine is in a long step; showing the last snapshot")

    def _loaded_engine(self) -> EngineThread | None:
        return None if self._status.stats is None else self._engine

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stop_requested.is_set():
            os._exit(128 + number)  # sys.exit would wait for a step in the engine's thread
        self._stop_requested.set()
        if self._worker is not None:
            self._status.report(WorkerPhase.DRAINING, 0.0)
            self._worker.drain()
