"""The state of one gateway process, and a request's context and body for its handler.

app.py creates the state; handlers find it under STATE. A RequestContext holds everything about a request except its
body. Bodies are read with limits of size and time before they are parsed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from aiohttp import StreamReader, web

from gateway.auth.access import ACCOUNT
from gateway.auth.rate_limits import Account
from gateway.errors import BodyTooLarge, InvalidJson, RateLimited, RequestTimeout, UnsupportedMediaType
from gateway.fleet import OpenRequests, bytes_in_flight
from gateway.http.event_stream import StreamWatch
from gateway.http.json_body import MAX_BODY_BYTES
from gateway.http.kept_bodies import KeptBodies
from gateway.http.media_type import charset_of, check_encoding, media_type_of
from gateway.metrics import GatewayMetrics
from gateway.model_service import ModelOptions, ModelService, ModelTable
from gateway.pipeline.fields import Timeouts
from gateway.pipeline.plan import get_ready
from gateway.settings import GatewaySettings
from gateway.store.inference_client import InferenceClient
from gateway.work.background import BackgroundWork
from gateway.work.fair_pool import FairPool, TooMuchWaits, is_short
from gateway.work.loop_scheduler import LoopScheduler
from gateway.work.owner_tasks import OwnerTasks
from gateway.work.work_process import WorkProcesses
from shared.model_files import ModelFilesError

NUM_PROCESSES = 2  # each loads the tokenizer of each model: 110 MB for a vocabulary of 49,152

_Result = TypeVar("_Result")
TRACEPARENT = web.RequestKey("traceparent", str)  # set by a middleware


class GatewayState:
    def __init__(
        self,
        settings: GatewaySettings,
        clients: Mapping[ModelOptions, InferenceClient],
        metrics: GatewayMetrics,
        processes: WorkProcesses | None = None,
    ) -> None:
        """Create the state. Without `processes`, long requests are parsed in threads."""
        self.settings = settings
        self.metrics = metrics
        self.watch = StreamWatch(
            settings.sse_keep_alive_seconds, settings.write_stall_seconds, metrics.write_stalls.inc
        )
        self.pool = FairPool()
        self._processes = processes
        self.readers = FairPool() if processes is None else FairPool(NUM_PROCESSES, processes.run)
        self.background = BackgroundWork(metrics.handler_errors.inc)
        self.owners = OwnerTasks(lambda task, is_up: metrics.owner_task_up.labels(task).set(is_up))
        self.open_requests = OpenRequests(metrics.open_requests, settings.max_num_streams, self._count_refusal)
        self.bytes_in_flight = bytes_in_flight(settings.max_bytes_in_flight)
        self.kept_bodies = KeptBodies(self.bytes_in_flight)
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
                    worker_wait_seconds=settings.no_worker_wait_seconds if settings.no_worker == "wait" else 0.0,
                    num_models=len(clients),
                )
                for options, client in clients.items()
            ]
        )

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

    def service(self, model_name: str | None, account: Account) -> ModelService:
        """Return the model of a name. Raises ModelNotFound or MissingParameter."""
        return self.models.find(model_name, account)

    def selected_services(self, model_name: str | None, account: Account) -> list[ModelService]:
        """Return the model of a name, or without a name all that the account may use. Raises ModelNotFound."""
        return self.models.of(account) if model_name is None else [self.models.find(model_name, account)]

    async def keep_reader_ready(self, *readers: object) -> None:
        """Keep a started process ready for the next long request, which would wait 0.5 s for its start.

        It begins after the models are loaded and their workers are ready, because a worker's start needs the cores.

        Args:
            readers: The parsers that the process loads.
        """
        for service in self.models:
            await service.client.fleet.was_ready.wait()
        if self._processes is not None:
            models = [service.require_model() for service in self.models]
            self._processes.keep_one_ready(partial(get_ready, models, readers), NUM_PROCESSES)

    def close(self) -> None:
        """End the pools without waiting."""
        self.pool.close()
        self.readers.close()
        if self._processes is not None:
            self._processes.close()

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


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The sender and the headers of a request, which came over HTTP or is a line of a batch."""

    state: GatewayState
    account: Account  # charged for the request
    headers: Mapping[str, str]
    default_timeouts: Timeouts
    default_detach_seconds: float  # of a stored answer
    traceparent: str = ""
    for_batch: bool = False  # a line of a batch, which latency metrics leave out
    arrived_at: float = field(default_factory=time.monotonic)  # seconds

    async def work(self, num_bytes: int | None, work: Callable[[], _Result], *, may_refuse: bool = True) -> _Result:
        """Run work for the account without blocking the event loop, and return its result (fair_pool.py).

        Raises RateLimited.
        """
        if is_short(num_bytes):  # the usual case, five times per request: saves two coroutines each
            return work()
        return await self._in_turn(self.state.pool, num_bytes, work, may_refuse=may_refuse)

    async def read(self, num_bytes: int | None, work: Callable[[], _Result]) -> _Result:
        """Run the parsing of a request; if it is long, in a process, which does not hold this interpreter's lock.

        Raises RateLimited.
        """
        if is_short(num_bytes):
            return work()
        return await self._in_turn(self.state.readers, num_bytes, work)

    async def _in_turn(
        self, pool: FairPool, num_bytes: int | None, work: Callable[[], _Result], *, may_refuse: bool = True
    ) -> _Result:
        try:
            return await pool.run(self.account, num_bytes, work, may_refuse=may_refuse)
        except TooMuchWaits as error:
            raise RateLimited(
                "Too many requests from this API key are waiting to be parsed; retry in 1 s.",
                code="max_waiting_exceeded",
                retry_after_seconds=1,
            ) from error  # fmt: skip


def context_of(http: web.Request) -> RequestContext:
    """Return the context of an HTTP request."""
    state = http.app[STATE]
    return RequestContext(
        state,
        http[ACCOUNT],
        http.headers,
        state.default_timeouts,
        state.settings.default_detach_seconds,
        http[TRACEPARENT],
    )


@asynccontextmanager
async def received_body(request: web.Request) -> AsyncIterator[bytes]:
    """Read the body of a request. Its bytes count toward the key's share, from before they arrive to the context's end.

    Raises:
        UnsupportedMediaType: If it is compressed, or not JSON.
        BodyTooLarge: If it has more than MAX_BODY_BYTES.
        KeyShareExceeded: If the key would exceed its share of the bytes in flight.
        Unavailable: If all keys together would exceed the bytes in flight.
        RequestTimeout: If it does not arrive within --body-timeout-seconds.
        InvalidJson: If the connection closes before its end.
    """
    state = request.app[STATE]
    _check_media_type(request)
    length = request.content_length
    if length is not None and length > MAX_BODY_BYTES:
        raise _too_large()
    with state.bytes_in_flight.hold(request[ACCOUNT], MAX_BODY_BYTES if length is None else length) as held:
        timeout_seconds = state.settings.body_timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                body = await _read(request.content)
        except TimeoutError as error:
            raise RequestTimeout(f"The request body did not arrive within {timeout_seconds:g} s.") from error
        except web.RequestPayloadError as error:
            raise InvalidJson("The connection closed before the full request body arrived.") from error
        held.shrink(len(body))
        yield body


async def _read(content: StreamReader) -> bytes:
    """Read all bytes. `web.Request.read()` would keep a second copy as long as the request."""
    first = await content.readany()
    if content.at_eof():  # the usual case
        if len(first) > MAX_BODY_BYTES:
            raise _too_large()
        return first
    body = bytearray(first)
    while chunk := await content.readany():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"The request body exceeds the limit of {MAX_BODY_BYTES} bytes.")


def _check_media_type(request: web.Request) -> None:
    check_encoding(request)
    if request.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
        raise UnsupportedMediaType("Transfer-Encoding: only chunked, or no Transfer-Encoding, is supported.")
    if "Content-Type" not in request.headers:
        return
    media_type = media_type_of(request)
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"Content-Type: expected application/json, got {media_type}.")
    if charset_of(request) not in ("utf-8", "utf8"):
        raise UnsupportedMediaType("Content-Type: expected charset utf-8, the only encoding of JSON.")
