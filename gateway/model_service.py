"""A served model at this gateway: its files, queue, workers, metrics, and admission; and the table of all models.

The `model` field of a request selects one by its name or an alias. The models share open requests, background work,
and the loop scheduler.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry

from gateway.auth.rate_limits import Account
from gateway.errors import InvalidRequest, MissingParameter, ModelNotFound, Unavailable
from gateway.fleet import OpenRequests, Readiness, Timeouts, assess, check_state, state_of, unavailable
from gateway.metrics import DeliveryCollector, ModelMetrics
from gateway.settings import GENERATION_CONFIGS, REASONING_PARSERS, TASKS, TOOL_CALL_PARSERS, GatewaySettings
from gateway.store.acceptance import share_of
from gateway.store.inference_client import InferenceClient
from gateway.text.served_model import ModelLimits, ServedModel, is_complete, load_served_model, read_chat_template
from gateway.work.background import BackgroundWork
from gateway.work.loop_scheduler import LoopScheduler
from shared.messages import max_beam_width
from shared.model_files import ModelFilesError, Task, task_of
from shared.models_file import ModelEntry, check_names, read_models
from shared.new_requests import Share
from shared.settings import SettingsError

logger = logging.getLogger("gateway")
MODEL_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The start options of a served model: names, directory, and how its text is parsed."""

    names: tuple[str, ...]  # the first is used in answers, metrics, and store keys; the others are aliases
    directory: Path
    max_model_len: int | None = None  # tokens; None: the model's
    chat_template: Path | None = None  # None: the model's
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    generation_config: str = "auto"
    task: str = "auto"

    @property
    def name(self) -> str:
        return self.names[0]


def model_options(settings: GatewaySettings) -> tuple[ModelOptions, ...]:
    """Return the options of --model, or of each entry of --models-file. Raises SettingsError."""
    if settings.models_file is not None:
        entries = read_models(settings.models_file)
    else:
        assert settings.model is not None, "the settings require one of --model and --models-file"
        entries = [ModelEntry(model=str(settings.model), names=settings.served_model_name)]
    options = tuple(_options(entry, settings) for entry in entries)
    check_names(name for model in options for name in model.names)
    return options


def _options(entry: ModelEntry, settings: GatewaySettings) -> ModelOptions:
    directory = Path(entry.model)
    tool_call_parser, reasoning_parser = entry.tool_call_parser, entry.reasoning_parser
    return ModelOptions(
        names=entry.names or (directory.resolve().name,),
        directory=directory,
        max_model_len=entry.max_model_len or settings.max_model_len,
        chat_template=_template_file(entry.chat_template, settings.chat_template),
        tool_call_parser=_one_of(TOOL_CALL_PARSERS, tool_call_parser, "tool_call_parser") or settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser
        if reasoning_parser is None
        else _one_of(REASONING_PARSERS, reasoning_parser, "reasoning_parser"),
        generation_config=_one_of(GENERATION_CONFIGS, entry.generation_config, "generation_config")
        or settings.generation_config,
        task=_one_of(TASKS, entry.task, "task") or settings.task,
    )


def _template_file(of_entry: str | None, of_all: Path | None) -> Path | None:
    """Return the file of an entry or the flag; raise SettingsError if it is no chat template."""
    path = of_all if of_entry is None else Path(of_entry)
    try:
        if path is not None:
            read_chat_template(path)
    except ModelFilesError as error:
        raise SettingsError(f"--chat-template {error}") from error
    return path


def _one_of(known: tuple[str, ...], value: str | None, field: str) -> str:
    if value is not None and value not in known:
        raise SettingsError(f"--models-file: {field}: expected one of {', '.join(filter(None, known))}; got {value!r}")
    return value or ""


class ModelService:
    def __init__(
        self,
        options: ModelOptions,
        client: InferenceClient,
        metrics: ModelMetrics,
        open_requests: OpenRequests,
        background: BackgroundWork,
        loop_scheduler: LoopScheduler,
        *,
        worker_wait_seconds: float,
        num_models: int = 1,
    ) -> None:
        """Create the service of one model.

        Args:
            options: Its start options.
            client: Its queue and workers in the store.
            metrics: Its metrics.
            open_requests: Shared by all models.
            background: Shared by all models.
            loop_scheduler: Shared by all models.
            worker_wait_seconds: How long requests are accepted after the last ready worker; 0: not at all.
            num_models: The number of models of this gateway.
        """
        self.options = options
        self.client = client
        self.metrics = metrics
        self.unrecorded = ModelMetrics(CollectorRegistry())  # for repeated answers, because each is measured once
        self.background = background
        self.left_until: dict[str, float] = {}  # answers whose clients have left, by request id, in seconds of the loop
        self.loop_scheduler = loop_scheduler
        self.loaded = asyncio.Event()
        self.model: ServedModel | None = None
        self._open_requests = open_requests
        self._worker_wait_seconds = worker_wait_seconds
        self._num_models = num_models
        self._started_at = time.monotonic()
        metrics.registry.register(DeliveryCollector(client.counts, client.streams))

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def names(self) -> tuple[str, ...]:
        return self.options.names

    def to_read(self) -> "ReadModel":
        """Return what is needed to parse a request, for another process."""
        return ReadModel(self.names, self.model, self.limits(self.model) if self.model is not None else None)

    async def load(self) -> None:
        """Load the tokenizer, after waiting until the model directory is complete. Raises ModelFilesError."""
        options, directory = self.options, self.options.directory
        while not is_complete(directory):
            await asyncio.sleep(MODEL_POLL_SECONDS)
        try:
            model = await asyncio.to_thread(
                load_served_model, directory,
                max_model_len=options.max_model_len, generation_config=options.generation_config,
                chat_template=options.chat_template,
            )  # fmt: skip
            self.model = replace(
                model,
                tool_call_parser=options.tool_call_parser,
                reasoning_parser=options.reasoning_parser,
                task=task_of(directory) if options.task == "auto" else Task(options.task),
            )
        except ModelFilesError as error:
            logger.error("model %s: cannot be served: %s", self.name, error)
            raise
        self.loaded.set()
        logger.info("model %s: tokenizer ready; task %s", self.name, self.model.task)
        if model.defaults:
            defaults = ", ".join(f"{name} {value:g}" for name, value in model.defaults.items())
            logger.info("model %s: defaults from generation_config.json: %s", self.name, defaults)

    def readiness(self) -> Readiness:
        """Return the state for /ready."""
        return assess(self.client.fleet.snapshot(), self._state(), time.monotonic() - self._started_at)

    def _state(self) -> str:
        num_ready = len(self.client.fleet.ready)
        return state_of(
            draining=self._open_requests.draining,
            model_loaded=self.model is not None,
            num_ready=num_ready,
            was_ready=self.client.fleet.last_ready is not None or self.client.history.was_served,
            is_waited_for=not num_ready and self._is_waited_for(),
        )

    def _is_waited_for(self) -> bool:
        """Return whether requests are accepted while no worker is ready.

        One was ready a short time ago, or before this gateway started, a short time ago.
        """
        last_ready = self.client.fleet.last_ready
        seconds = time.monotonic() - self._started_at if last_ready is None else last_ready.seconds_since_seen
        return seconds < self._worker_wait_seconds

    def require_model(self) -> ServedModel:
        """Return the tokenizer, for routes that need no worker. Raises Unavailable."""
        if self.model is None:
            raise unavailable("starting")
        return self.model

    def admit(self) -> ServedModel:
        """Check that a request can be accepted now, and return the tokenizer. Raises Unavailable."""
        try:
            check_state(self._state(), store_has_room=self.client.store_memory.has_room)
        except Unavailable as error:
            self.metrics.rejected.labels(error.code).inc()
            raise
        return self.require_model()

    def check_task(self, task: Task, models: Sequence["ModelService"]) -> None:
        """Check that the model is served for a task; `models` are those that the account may use.

        Raises:
            InvalidRequest: With the names of those that are.
        """
        own = self.require_model().task
        if own is task:
            return
        names = ", ".join(repr(other.name) for other in models if other.model and other.model.task is task)
        others = f"use {names}" if names else f"no model here has that task; --task {task} serves one for it"
        raise InvalidRequest(
            f"model: {self.name!r} is served with task {own}; this route needs task {task}: {others}.", param="model"
        )

    def within_wait(self, timeouts: Timeouts) -> Timeouts:
        """Return the timeouts of a request admitted now: without a ready worker the queue time is bounded."""
        if self.client.fleet.ready or timeouts.queue_seconds:
            return timeouts
        return replace(timeouts, queue_seconds=timeouts.no_worker_seconds)

    def share_of(self, account: Account) -> Share:
        """Return the account's share of the queue and of the store's memory."""
        store_bytes = self.client.store_memory.max_bytes
        share = share_of(account.owner_key_hash, account.store_ratio, store_bytes, self._num_models)
        return replace(share, weight=account.weight, divides_queue=account.has_neighbors)

    @property
    def fingerprint(self) -> str:
        """The system_fingerprint that the last ready worker reported; "" before, or from an older worker."""
        last_ready = self.client.fleet.last_ready
        return last_ready.heartbeat.fingerprint if last_ready is not None else ""

    def limits(self, model: ServedModel) -> ModelLimits:
        """Return the limits of a request to this model.

        The context is the longest of all ready workers: a worker with a shorter one claims only requests that fit.
        While no worker is ready, the last ready one counts.
        """
        ready = self.client.fleet.ready
        if not ready and (last_ready := self.client.fleet.last_ready) is not None:
            ready = [last_ready.heartbeat]
        lengths = [beat.max_model_len for beat in ready if beat.max_model_len]
        context = min(model.max_model_len, max(lengths, default=model.max_model_len))
        widths = [max_beam_width(beat.max_num_seqs) for beat in ready if beat.max_num_seqs]
        return ModelLimits(context, model.vocab_size, min(widths, default=None))


@dataclass(frozen=True, slots=True)
class ReadModel:
    """The part of a model that is needed to parse a request. It can be pickled."""

    names: tuple[str, ...]
    model: ServedModel | None  # None: not loaded yet
    limits: ModelLimits | None

    def require(self) -> tuple[ServedModel, ModelLimits]:
        """Return the model and its limits. Raises Unavailable."""
        if self.model is None or self.limits is None:
            raise unavailable("starting")
        return self.model, self.limits


class ModelTable:
    """All models of this gateway."""

    def __init__(self, services: Sequence[ModelService]) -> None:
        self._services = tuple(services)

    def __iter__(self) -> Iterator[ModelService]:
        return iter(self._services)

    def of(self, account: Account) -> list[ModelService]:
        """Return the models that the account may use."""
        return [service for service in self._services if account.may_use(service.options.names)]

    def find(self, name: str | None, account: Account) -> ModelService:
        """Return the model of a name that the account may use. Raises as find_model() does."""
        return find_model(self.of(account), name)

    def to_read(self, account: Account) -> list[ReadModel]:
        """Return the models that the account may use, for find_model() in a parser."""
        return [service.to_read() for service in self.of(account)]


class _Named(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...


_Model = TypeVar("_Model", bound=_Named)


def find_model(models: Sequence[_Model], name: str | None) -> _Model:
    """Return the model of a name; without a name, the only model.

    Raises:
        ModelNotFound: If no model has the name.
        MissingParameter: If there is no name and not exactly one model.
    """
    names = ", ".join(repr(known) for model in models for known in model.names) or "none for this key"
    if name is None:
        if len(models) == 1:
            return models[0]
        raise MissingParameter(f"Missing required parameter: model. This server has {names}.", param="model")
    for model in models:
        if name in model.names:
            return model
    raise ModelNotFound(f"The model {name[:100]!r} does not exist; this server has {names}.", param="model")
