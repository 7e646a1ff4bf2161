"""A served model at this gateway: its files, its queue and workers in the store, its metrics, who is let in; and the
table of all, in which the `model` of a request chooses one by its name or an alias.

What all models share (open requests, background work, turns of the event loop) is handed in. Knows no HTTP.

A chat's way in, where its model is found and it is let in.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry

from gateway.admission import Load, OpenRequests, Readiness, admit, assess, unavailable
from gateway.auth.rate_limits import Account
from gateway.background import BackgroundWork
from gateway.errors import MissingParameter, ModelNotFound, Unavailable
from gateway.loop_scheduler import LoopScheduler
from gateway.metrics import DeliveryCollector, ModelMetrics
from gateway.requests.generation_fields import Timeouts, without_worker
from gateway.requests.openai_schema import CompletionRequest
from gateway.requests.planning import ModelLimits, encode_prompts
from gateway.settings import GENERATION_CONFIGS, REASONING_PARSERS, TOOL_CALL_PARSERS, GatewaySettings
from gateway.store.acceptance import share_of
from gateway.store.inference_client import InferenceClient, Share
from gateway.text.served_model import ServedModel, is_complete, load_served_model
from shared.messages import max_beam_width
from shared.model_files import ModelFilesError
from shared.models_file import ModelEntry, check_names, read_models
from shared.settings import SettingsError

logger = logging.getLogger("gateway")
MODEL_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A served model as it is named at the start: its names, its directory, how its text is read."""

    names: tuple[str, ...]  # the first is in answers, in metrics and in the store's keys; the others are aliases
    directory: Path
    max_model_len: int | None = None  # None: the model's own
    tool_call_parser: str = "auto"
    reasoning_parser: str = ""
    generation_config: str = "auto"

    @property
    def name(self) -> str:
        return self.names[0]


def model_options(settings: GatewaySettings) -> tuple[ModelOptions, ...]:
    """The options of --model, or of each entry of --models-file. Raises SettingsError."""
    if settings.models_file is not None:
        entries = read_models(settings.models_file)
    else:
        assert settings.model is not None, "settings have one of them"
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
        tool_call_parser=_one_of(TOOL_CALL_PARSERS, tool_call_parser, "tool_call_parser") or settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser
        if reasoning_parser is None
        else _one_of(REASONING_PARSERS, reasoning_parser, "reasoning_parser"),
        generation_config=_one_of(GENERATION_CONFIGS, entry.generation_config, "generation_config")
        or settings.generation_config,
    )


def _one_of(known: tuple[str, ...], value: str | None, field: str) -> str:
    if value is not None and value not in known:
        raise SettingsError(f"--models-file: {field} is {value!r}; expected one of {', '.join(filter(None, known))}")
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
        """`num_models`: of this gateway, all together; `worker_wait_seconds`: for how long after the last ready worker
        the next one is waited for; 0: not at all."""
        self.options = options
        self.client = client
        self.metrics = metrics
        self.unrecorded = ModelMetrics(CollectorRegistry())  # for answers given again: each is measured once
        self.background = background
        self.loop_scheduler = loop_scheduler
        self.loaded = asyncio.Event()
        self.model: ServedModel | None = None
        self._open_requests = open_requests
        self._worker_wait_seconds = worker_wait_seconds
        self._num_models = num_models
        self._started_at = time.monotonic()
        metrics.registry.register(DeliveryCollector(client))

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def names(self) -> tuple[str, ...]:
        return self.options.names

    def to_read(self) -> "ReadModel":
        return ReadModel(self.names, self.model, self.limits(self.model) if self.model is not None else None)

    async def load(self) -> None:
        """Waits for the directory: it may still be downloaded and converted. Raises ModelFilesError."""
        options, directory = self.options, self.options.directory
        while not is_complete(directory):
            await asyncio.sleep(MODEL_POLL_SECONDS)
        try:
            model = await asyncio.to_thread(
                load_served_model, directory,
                max_model_len=options.max_model_len, generation_config=options.generation_config,
            )  # fmt: skip
            tells_reasoning = bool(options.reasoning_parser)
            self.model = replace(model, tells_reasoning=tells_reasoning, tool_call_parser=options.tool_call_parser)
        except ModelFilesError as error:
            logger.error("the model %s cannot be served: %s", self.name, error)
            raise
        self.loaded.set()
        logger.info("tokenizer of %s ready", self.name)
        if model.defaults:
            told = ", ".join(f"{name} {value:g}" for name, value in model.defaults.items())
            logger.info("what requests to %s do not say is as its generation_config.json has it: %s", self.name, told)

    def readiness(self) -> Readiness:
        return assess(
            self.client.fleet.snapshot(),
            model_loaded=self.model is not None,
            was_ready=self.client.fleet.last_ready is not None,
            is_waited_for=self._is_waited_for(),
            draining=self._open_requests.draining,
            elapsed_seconds=time.monotonic() - self._started_at,
        )

    def _is_waited_for(self) -> bool:
        """Whether requests are taken while no worker is ready: one was, a short time ago."""
        last_ready = self.client.fleet.last_ready
        return last_ready is not None and last_ready.seconds_since_seen < self._worker_wait_seconds

    def require_model(self) -> ServedModel:
        """The tokenizer, for routes that need no worker. Raises Unavailable."""
        if self.model is None:
            raise unavailable("starting")
        return self.model

    def admit(self) -> ServedModel:
        """Raises Unavailable."""
        num_ready = len(self.client.fleet.ready)
        load = Load(
            draining=self._open_requests.draining,
            model_loaded=self.model is not None,
            ready_workers=num_ready,
            was_ready=num_ready > 0 or self.client.fleet.last_ready is not None,
            is_waited_for=num_ready == 0 and self._is_waited_for(),
            store_has_room=self.client.store_memory.has_room,
        )
        try:
            admit(load)
        except Unavailable as error:
            self.metrics.rejected.labels(error.code).inc()
            raise
        return self.require_model()

    def within_wait(self, timeouts: Timeouts) -> Timeouts:
        """The timeouts of a request that is admitted now: nobody waits for ever for a worker that is to come."""
        return timeouts if self.client.fleet.ready else without_worker(timeouts)

    def share_of(self, account: Account) -> Share:
        """Return the account's share of the queue and of the store's memory."""
        store_bytes = self.client.store_memory.max_bytes
        share = share_of(account.owner_key_hash, account.store_ratio, store_bytes, self._num_models)
        return replace(share, weight=account.weight, divides_queue=account.has_neighbors)

    @property
    def fingerprint(self) -> str:
        """Of the model as the last ready worker serves it; empty before, and from a worker older than this field."""
        last_ready = self.client.fleet.last_ready
        return last_ready.heartbeat.fingerprint if last_ready is not None else ""

    def limits(self, model: ServedModel) -> ModelLimits:
        """The longest context of all: a worker with a shorter one takes only requests that fit. While none is ready,
        the next one is taken to be like the last."""
        ready = self.client.fleet.ready
        if not ready and (last_ready := self.client.fleet.last_ready) is not None:
            ready = [last_ready.heartbeat]
        told = [beat.max_model_len for beat in ready if beat.max_model_len]
        context = min(model.max_model_len, max(told, default=model.max_model_len))
        widths = [max_beam_width(beat.max_num_seqs) for beat in ready if beat.max_num_seqs]
        return ModelLimits(context, model.vocab_size, min(widths, default=None))


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model as it is needed to read a request, also in another process."""

    names: tuple[str, ...]
    model: ServedModel | None  # None: not yet
    limits: ModelLimits | None

    def require(self) -> tuple[ServedModel, ModelLimits]:
        """Raises Unavailable."""
        if self.model is None or self.limits is None:
            raise unavailable("starting")
        return self.model, self.limits


class ModelTable:
    def __init__(self, services: Sequence[ModelService]) -> None:
        self._services = tuple(services)

    def __iter__(self) -> Iterator[ModelService]:
        return iter(self._services)

    def of(self, account: Account) -> list[ModelService]:
        """The models that the account may use."""
        return [service for service in self._services if account.may_use(service.options.names)]

    def find(self, name: str | None, account: Account) -> ModelService:
        """Raises ModelNotFound, and MissingParameter where there are several to choose from."""
        return find_model(self.of(account), name)

    def to_read(self, account: Account) -> list[ReadModel]:
        """For find_model(), where the name is not yet read."""
        return [service.to_read() for service in self.of(account)]


class _Named(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...


_Model = TypeVar("_Model", bound=_Named)


def find_model(models: Sequence[_Model], name: str | None) -> _Model:
    """Raises ModelNotFound, and MissingParameter where there are several to choose from."""
    names = ", ".join(repr(known) for model in models for known in model.names) or "none for this key"
    if name is None:
        if len(models) == 1:
            return models[0]
        raise MissingParameter(f"Missing required parameter: model. This server has {names}.", param="model")
    for model in models:
        if name in model.names:
            return model
    raise ModelNotFound(f"The model {name[:100]!r} does not exist; this server has {names}.", param="model")


_Body = TypeVar("_Body")


def num_prompt_tokens(body: _Body, parse: Callable[[_Body], CompletionRequest], models: Sequence[ReadModel]) -> int:
    """The length of the one prompt of a body, as its usage would tell it. Raises GatewayError."""
    request = parse(body)
    (token_ids,) = encode_prompts(*find_model(models, request.model).require(), request)
    return len(token_ids)
