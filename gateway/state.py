"""What one gateway process holds for its whole life, and the questions that routes ask of it.

Composed in app.py; no HTTP in here.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.admission import RETRY_AFTER_SECONDS, Limits, Load, Rejected, admit
from gateway.errors import ModelNotFound, Unavailable
from gateway.http.event_stream import StreamWatch
from gateway.metrics import GatewayMetrics
from gateway.readiness import Readiness, assess, ready_workers
from gateway.requests.deadlines import Timeouts
from gateway.requests.grammar_checks import GrammarChecks
from gateway.requests.planning import ModelLimits
from gateway.settings import GatewaySettings
from gateway.store.inference_client import InferenceClient
from gateway.text.served_model import ModelFilesError, ServedModel, is_complete, load_served_model
from shared.tasks import cancel_and_wait

logger = logging.getLogger("gateway")

MODEL_POLL_SECONDS = 0.2


class GatewayState:
    def __init__(self, settings: GatewaySettings, client: InferenceClient, metrics: GatewayMetrics) -> None:
        self.settings = settings
        self.client = client
        self.metrics = metrics
        self.watch = StreamWatch(
            settings.sse_keep_alive_seconds, settings.write_stall_seconds, metrics.write_stalls.inc
        )
        self.grammar_checks = GrammarChecks()
        self.draining = False
        self.model_loaded = asyncio.Event()
        self.model_failed = asyncio.Event()  # the directory is there and cannot be served: nothing to wait for
        self.started_at_unix = int(time.time())
        self._started_at = time.monotonic()
        self._model: ServedModel | None = None
        self._was_ready = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lingering: set[asyncio.Task[Any]] = set()
        self.unrecorded = GatewayMetrics(CollectorRegistry())  # for answers given again: each is measured once

    @property
    def model_name(self) -> str:
        return self.settings.model_name

    @property
    def default_timeouts(self) -> Timeouts:
        return Timeouts(self.settings.default_timeout_seconds, self.settings.default_queue_timeout_seconds)

    @property
    def model(self) -> ServedModel | None:
        return self._model

    async def load_model(self) -> None:
        """Waits for the directory: it may still be downloaded and converted."""
        while not is_complete(self.settings.model):
            await asyncio.sleep(MODEL_POLL_SECONDS)
        try:
            self._model = await asyncio.to_thread(
                load_served_model, self.settings.model, max_model_len=self.settings.max_model_len
            )
        except ModelFilesError as error:
            logger.error("the model cannot be served: %s", error)
            self.model_failed.set()
            return
        self.model_loaded.set()
        logger.info("tokenizer ready")

    def readiness(self) -> Readiness:
        readiness = assess(
            self.client.fleet,
            model_loaded=self._model is not None,
            was_ready=self._was_ready,
            draining=self.draining,
            elapsed_seconds=time.monotonic() - self._started_at,
        )
        self._was_ready = self._was_ready or readiness.is_ready
        return readiness

    def check_model_name(self, name: str | None) -> None:
        """There is one model, so a request need not name it."""
        if name is not None and name != self.model_name:
            shown = name[:100]
            raise ModelNotFound(
                f"The model {shown!r} does not exist; this server has {self.model_name!r}.", param="model"
            )

    def require_model(self) -> ServedModel:
        """The tokenizer, for routes that need no worker."""
        if self._model is None:
            raise unavailable("starting", "The model is being loaded; GET /ready tells how far it is.")
        return self._model

    def admit(self) -> ServedModel:
        readiness = self.readiness()
        load = Load(
            draining=self.draining,
            model_loaded=self._model is not None,
            ready_workers=readiness.ready_workers,
            was_ready=self._was_ready,
            open_requests=self._num_open,
            store_has_room=self.client.store_memory.has_room,
        )
        decision = admit(load, Limits(max_open_requests=self.settings.max_num_streams))
        if isinstance(decision, Rejected):
            self.metrics.rejected.labels(decision.reason).inc()
            raise unavailable(decision.reason, decision.message)
        return self.require_model()

    def limits(self, model: ServedModel) -> ModelLimits:
        """The smallest context of all: any worker may be the one that takes the request."""
        told = [beat.max_model_len for beat in ready_workers(self.client.fleet) if beat.max_model_len]
        return ModelLimits(min([model.max_model_len, *told]), model.vocab_size)

    @contextmanager
    def counted(self, route: str) -> Iterator[None]:
        """An inference request is open: a drain waits for it."""
        gauge = self.metrics.open_requests.labels(route)
        self._num_open += 1
        self._idle.clear()
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    async def wait_idle(self, timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """For what must not be cancelled with the handler that asks for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def linger(self, work: Coroutine[Any, Any, None]) -> None:
        """For what goes on without a client, at most until this gateway ends."""
        task = asyncio.create_task(work)
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def finish_background(self) -> None:
        await cancel_and_wait(self._lingering)
        await asyncio.gather(*self._tasks, return_exceptions=True)


def unavailable(reason: str, message: str) -> Unavailable:
    return Unavailable(message, code=reason, retry_after_seconds=RETRY_AFTER_SECONDS[reason])
