"""The state of one gateway process. app.py creates it; handlers find it under STATE."""

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from aiohttp import web

from gateway.auth.access import ACCOUNT
from gateway.fleet import OpenRequests, Timeouts, bytes_in_flight
from gateway.http.kept_bodies import KeptBodies
from gateway.http.open_response import StreamWatch
from gateway.http.read_turns import ReadTurns
from gateway.metrics import GatewayMetrics
from gateway.model_service import ModelOptions, ModelService, ModelTable
from gateway.settings import GatewaySettings
from gateway.store.inference_client import InferenceClient
from gateway.text.served_model import get_ready
from gateway.work.background import BackgroundWork
from gateway.work.loop_scheduler import LoopScheduler
from gateway.work.owner_tasks import OwnerTasks
from gateway.work.reader_pool import ReaderPool
from shared.model_files import ModelFilesError

TRACEPARENT = web.RequestKey("traceparent", str)  # set by a middleware


class GatewayState:
    def __init__(
        self,
        settings: GatewaySettings,
        clients: Mapping[ModelOptions, InferenceClient],
        metrics: GatewayMetrics,
        readers: ReaderPool | None = None,
    ) -> None:
        """Create the state. `readers` parse long requests; default: the threads of `pool`."""
        self.settings = settings
        self.metrics = metrics
        self.watch = StreamWatch(
            settings.sse_keep_alive_seconds, settings.write_stall_seconds, metrics.write_stalls.inc
        )
        self.pool = ReaderPool()
        self.readers = readers or self.pool
        self.background = BackgroundWork(metrics.handler_errors.inc)
        self.owners = OwnerTasks(lambda task, is_up: metrics.owner_task_up.labels(task).set(is_up))
        self.open_requests = OpenRequests(metrics.open_requests, settings.max_num_streams, self._count_refusal)
        self.bytes_in_flight = bytes_in_flight(settings.max_bytes_in_flight)
        self.read_turns = ReadTurns()
        self.kept_bodies = KeptBodies(self.bytes_in_flight)
        # Of one model, because a key has one budget; all gateways choose the same.
        self.limits = clients[min(clients, key=lambda options: options.name)].limits
        self.started_at_unix = int(time.time())
        self.models_loaded = asyncio.Event()
        self.model_failed = asyncio.Event()  # a model's files are complete, but it cannot be served
        loop_scheduler = LoopScheduler()
        self.models = ModelTable(
            [
                ModelService(
                    options,
                    client,
                    metrics.of_model(options.name),
                    self.open_requests,
                    self.background,
                    loop_scheduler,
                    worker_wait_seconds=_worker_wait_seconds(settings),
                    num_models=len(clients),
                )
                for options, client in clients.items()
            ]
        )

    def num_streams(self) -> int:
        """Return the number of readers of answers whose memory is not free yet, which may be after their requests."""
        return sum(len(service.client.streams) for service in self.models)

    def hold_bytes(self, request: web.Request, num_bytes: int) -> AbstractContextManager[object]:
        """Count bytes that wait to be sent, except on routes without a key.

        Raises:
            KeyShareExceeded: If the key would exceed its share.
            Unavailable: If all keys together would exceed the limit.
        """
        account = request.get(ACCOUNT)
        return nullcontext() if account is None else self.bytes_in_flight.hold(account, num_bytes)

    def _count_refusal(self, reason: str) -> None:
        """Count a request that was refused before its model was known, under the first model."""
        next(iter(self.models)).metrics.rejected.labels(reason).inc()

    @property
    def default_timeouts(self) -> Timeouts:
        settings = self.settings
        return Timeouts(
            settings.default_timeout_seconds, settings.default_queue_timeout_seconds, settings.no_worker_wait_seconds
        )

    async def keep_reader_ready(self, *readers: object) -> None:
        """Keep a started process ready for the next long request, which would wait 0.5 s for its start.

        It begins after the models are loaded and their workers are ready, because a worker's start needs the cores.

        Args:
            readers: The parsers that the process loads.
        """
        for service in self.models:
            await service.client.fleet.was_ready.wait()
        models = [service.require_model() for service in self.models]
        self.readers.keep_one_ready(partial(get_ready, models, readers))

    def close(self) -> None:
        """End the pools without waiting."""
        self.pool.close()
        self.readers.close()

    async def write_probe(self) -> float:
        """Return the seconds that one write to the store took. Raises StoreUnavailable."""
        return await next(iter(self.models)).client.probe.write_seconds()

    async def load_models(self) -> None:
        """Load all models, and set models_loaded or model_failed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for service in self.models:
                    tasks.create_task(service.load())
        except* ModelFilesError:
            self.model_failed.set()
        else:
            self.models_loaded.set()


STATE = web.AppKey("STATE", GatewayState)


def _worker_wait_seconds(settings: GatewaySettings) -> float:
    """Return how long requests are accepted after the last ready worker."""
    return {"wait": settings.no_worker_wait_seconds, "refuse": 0.0, "queue": math.inf}[settings.no_worker]
