"""The choices of one request, from submission to their last text: events of the engine in, text updates out.

    generation = Generation(state, model, request, choices, arrived_at)
    await generation.submit()                       # accepted, all or none
    async for updates in generation.updates(): ...  # ChoiceUpdates that came together
    generation.abandon()                            # always, at the end: withdraws what has not finished

Knows nothing of HTTP or JSON.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gateway.errors import GatewayError, GenerationFailed, InvalidRequest
from gateway.inference_client import InferenceClient, QueueFull, ResponseStream, StoreUnavailable
from gateway.metrics import GatewayMetrics
from gateway.openai_response import UsageCount
from gateway.openai_schema import CompletionRequest
from gateway.output_text import OutputText, StopStrings
from gateway.planning import Choice
from gateway.served_model import ServedModel
from gateway.state import GatewayState, unavailable
from shared.messages import ErrorCode, ErrorEvent, FinishEvent, FinishReason, StreamEvent, TokenEvent


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    index: int
    text: str
    reason: FinishReason | None  # set once, in the choice's last update


class Generation:
    def __init__(
        self,
        state: GatewayState,
        model: ServedModel,
        request: CompletionRequest,
        choices: Sequence[Choice],
        arrived_at: float,
    ) -> None:
        self._state = state
        self._client: InferenceClient = state.client
        self._choices = [
            _ChoiceProgress(choice, _output_text(model, request, choice), state.metrics, arrived_at)
            for choice in choices
        ]
        self._streams: list[ResponseStream] = []
        self._pumps: list[asyncio.Task[None]] = []
        prompts = {choice.prompt_index: len(choice.request.prompt_token_ids) for choice in choices}
        self._prompt_tokens = sum(prompts.values())
        for num_tokens in prompts.values():
            state.metrics.prompt_tokens.observe(num_tokens)

    @property
    def usage(self) -> UsageCount:
        return UsageCount(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(choice.cached_tokens for choice in self._choices),
        )

    async def submit(self) -> None:
        """Raises Unavailable; what was accepted before it is withdrawn by abandon()."""
        try:
            for choice in self._choices:
                choice.submitted = True  # before the call: a lost reply may hide an acceptance
                self._streams.append(await self._client.submit(choice.request))
        except QueueFull as error:
            self._state.metrics.rejected.labels("queue_full").inc()
            raise unavailable("queue_full", "The queue is full; try again later.") from error
        except StoreUnavailable as error:
            self._state.metrics.rejected.labels("store_unavailable").inc()
            raise unavailable("store_unavailable", "The request store does not take requests now.") from error

    async def updates(self) -> AsyncIterator[list[ChoiceUpdate]]:
        """Ends when each choice has had its last update. Raises GatewayError when one fails."""
        num_open = len(self._choices)
        async for events in self._merged_events():
            updates = []
            for position, event in events:
                choice = self._choices[position]
                if choice.finished:
                    continue
                update = choice.take(event)
                if update.reason is not None:
                    num_open -= 1
                    if choice.stopped_early:
                        self._withdraw(choice)
                updates.append(update)
            if updates:
                yield updates
            if num_open == 0:
                return

    def abandon(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for choice in self._choices:
            if choice.submitted and not choice.finished:
                choice.record_end("cancelled")
                self._withdraw(choice)

    def _withdraw(self, choice: "_ChoiceProgress") -> None:
        self._state.in_background(self._client.cancel(choice.request.request_id))

    async def _merged_events(self) -> AsyncIterator[list[tuple[int, StreamEvent]]]:
        if len(self._streams) == 1:  # nearly always; spares a task and a queue
            async for event in self._streams[0]:
                yield [(0, event)]
            return
        queue: asyncio.Queue[tuple[int, StreamEvent]] = asyncio.Queue()
        for position, stream in enumerate(self._streams):
            self._pumps.append(asyncio.create_task(_pump(position, stream, queue)))
        while True:
            events = [await queue.get()]
            while not queue.empty():
                events.append(queue.get_nowait())
            yield events


class _ChoiceProgress:
    def __init__(self, choice: Choice, output: OutputText, metrics: GatewayMetrics, arrived_at: float) -> None:
        self.request = choice.request
        self.submitted = False
        self.finished = False
        self.stopped_early = False  # by a stop string: the engine does not know of it
        self.cached_tokens = 0
        self._index = choice.index
        self._output = output
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._first_token_at = 0.0
        self._last_token_at = 0.0

    @property
    def num_tokens(self) -> int:
        return self._output.num_tokens

    def take(self, event: StreamEvent) -> ChoiceUpdate:
        if isinstance(event, TokenEvent):
            self._record_tokens(time.monotonic())
            text = self._output.push(event.token_ids)
            if not self._output.stopped:
                return ChoiceUpdate(self._index, text, None)
            self.stopped_early = True
            return self._end(text, FinishReason.STOP)
        if isinstance(event, FinishEvent):
            self.cached_tokens = event.usage.cached_tokens
            if event.reason is FinishReason.CANCELLED:
                self.record_end("error")
                raise GenerationFailed("The request was cancelled by the server.", code="request_cancelled")
            text = self._output.finish(event.reason)
            return self._end(text, FinishReason.STOP if self._output.stopped else event.reason)
        self.record_end("error")
        raise _error_of(event)

    def record_end(self, reason: str) -> None:
        self.finished = True
        self._metrics.choices_finished.labels(reason).inc()

    def _end(self, text: str, reason: FinishReason) -> ChoiceUpdate:
        self.record_end(reason.value)
        self._metrics.generation_tokens.observe(self.num_tokens)
        if self.num_tokens > 1:
            self._metrics.time_per_output_token.observe(
                (self._last_token_at - self._first_token_at) / (self.num_tokens - 1)
            )
        self._metrics.request_duration.observe(time.monotonic() - self._arrived_at)
        return ChoiceUpdate(self._index, text, reason)

    def _record_tokens(self, now: float) -> None:
        if self._first_token_at:
            self._metrics.inter_token_latency.observe(now - self._last_token_at)
        else:
            self._first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._arrived_at)
        self._last_token_at = now


async def _pump(position: int, stream: ResponseStream, queue: asyncio.Queue[tuple[int, StreamEvent]]) -> None:
    async for event in stream:
        queue.put_nowait((position, event))


def _output_text(model: ServedModel, request: CompletionRequest, choice: Choice) -> OutputText:
    fields = request.fields
    include_stop = bool(fields.include_stop_str_in_output)
    sampling = choice.request.sampling
    eos_token_ids = frozenset[int]() if sampling.ignore_eos else model.eos_token_ids
    return OutputText(
        model.encoder.detokenizer(
            choice.request.prompt_token_ids, skip_special_tokens=fields.skip_special_tokens is not False
        ),
        StopStrings(request.stops, include_in_output=include_stop),
        terminal_token_ids=eos_token_ids.union(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        include_stop_token=include_stop,
    )


def _error_of(event: ErrorEvent) -> GatewayError:
    if event.code is ErrorCode.REQUEST_FAILED:
        return GenerationFailed("The engine could not complete this request.")
    return InvalidRequest(f"The engine refused this request: {event.message}", code=event.code.value)
