"""The choices of one answer, from acceptance to their last text: engine events in, text updates out.

    generation = Generation(service, model, request, streams, arrived_at, metrics)
    generation.listen(listener)                     # called when ready() has ChoiceUpdates; see reading.py
    generation.leave()                              # always, at the end: withdraws what has not finished

It is created after the store accepted the answer's requests (one per prompt, with all its choices), so a refused
request costs no detokenizer or parser. A kept answer can be attached to many times and continues for a while after its
readers have left.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gateway.errors import DeadlineExceeded, GatewayError, GenerationFailed, InvalidRequest
from gateway.fleet import unavailable
from gateway.metrics import ModelMetrics
from gateway.model_service import ModelService
from gateway.pipeline.answer_extras import PromptEcho, prompt_echo
from gateway.pipeline.choice_progress import (
    BestOf,
    ChoiceProgress,
    ChoiceUpdate,
    parsed,
)
from gateway.pipeline.message_parsers import message_parsers, needs_special_tokens
from gateway.pipeline.reading import Reading, Sink, nothing_plain
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.response_format import UsageCount
from gateway.store.inference_client import Inbox
from gateway.text.output_text import OutputText, StopStrings
from gateway.text.parsers.message import MessageParser
from gateway.text.served_model import ServedModel
from gateway.work.loop_scheduler import KeyScheduler
from shared.capabilities import NEEDS_NEWER_MESSAGE
from shared.messages import (
    EncodedLogprobs,
    ErrorCode,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    StreamEvent,
    TokenEvent,
)

__all__ = ["ChoiceUpdate", "Generation"]


class Generation:
    def __init__(
        self,
        service: ModelService,
        model: ServedModel,
        request: CompletionRequest,
        streams: Sequence[Inbox],
        arrived_at: float,
        metrics: ModelMetrics,
        ended_at: int = 0,
    ) -> None:
        """`streams`: one a prompt; `ended_at`: Unix seconds, of an answer that has ended before."""
        planned = [stream.request for stream in streams]
        keeps_marks = needs_special_tokens(model, request)
        self.service = service
        self.scheduler: KeyScheduler = service.loop_scheduler.of(planned[0].tenant)
        self._streams = streams
        self._ended_at = ended_at
        spellings = model.encoder.spellings(by_id=bool(request.fields.return_tokens_as_token_ids))
        self._echo = prompt_echo(model.encoder, request, [generation.prompt_token_ids for generation in planned])
        self._counts_tokens = request.max_tokens != 0  # of 0 the engine makes one, which nobody sees
        self._requests = [
            _RequestProgress(
                stream,
                [
                    ChoiceProgress(
                        index,
                        _output_text(model, request, stream.request, keeps_marks),
                        spellings,
                        metrics,
                        arrived_at,
                        scores_every_token=not request.is_chat,
                        is_ranked=request.choices.is_best_of,
                    )
                    for index in range(first_choice, first_choice + stream.request.sampling.n)
                ],
                _best_of(request, first_choice),
                message_parsers(
                    model, request, stream.request.prompt_token_ids, stream.request.request_id, first_choice
                ),
            )
            for first_choice, stream in zip(itertools.count(0, request.n), streams, strict=False)
        ]
        first = self._requests[0]
        is_plain = len(streams) == 1 and first.is_plain and self._echo is None and not request.stops
        # How nearly all are read: what ready() would give, if that is of one event of plain tokens, which end nothing,
        # and no more is there; None: ready(). An attribute, since it is called once a token.
        self.read_plain: Callable[[], Sequence[ChoiceUpdate] | None] = first.read_plain if is_plain else nothing_plain
        self._num_choices = request.n
        self._open = set(self._requests)
        self._may_reason = request.is_chat and model.reasoning is not None and not request.choices.is_best_of
        self._prompt_tokens = _counted_prompt_tokens(planned, metrics)

    @property
    def usage(self) -> UsageCount:
        return UsageCount(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(request.num_tokens for request in self._requests if self._counts_tokens),
            cached_tokens=sum(request.cached_tokens for request in self._requests),
            reasoning_tokens=self._num_reasoning_tokens,
            ended_at=self._ended_at or max(request.ended_at for request in self._requests),
        )

    def has_all_tokens(self, index: int) -> bool:
        """Whether a choice has as many tokens as it may have, so that its end is on its way. Not of ranked samples."""
        number, choice = divmod(index, self._num_choices)
        return self._requests[number].has_all_tokens(choice)

    @property
    def _num_reasoning_tokens(self) -> int | None:
        """Not of ranked samples, whose text is read at one time."""
        if not self._may_reason:
            return None
        return sum(parser.num_reasoning_tokens for request in self._requests for parser in request.parsers.values())

    @property
    def prompt_scores(self) -> list[dict[int, EncodedLogprobs]]:
        """The scores of each prompt, by index in it; whole before the first update, empty where nobody asked."""
        return [stream.prompt_logprobs for stream in self._streams]

    @property
    def is_over(self) -> bool:
        """Each choice has had its last update."""
        return not self._open and (self._echo is None or self._echo.is_done)

    def listen(self, listener: Callable[[], None]) -> None:
        """Set the callback for when ready() may have more; it runs in the receiving task and must not raise."""
        for stream in self._streams:
            stream.on_ready = listener

    def ready(self) -> Iterator[list[ChoiceUpdate]]:
        """Yield the available updates. If the caller stops early, the next call continues.

        Raises:
            GatewayError: If a choice fails.
        """
        return self._read() if self._echo is None else self._behind(self._echo)

    def _behind(self, echo: PromptEcho) -> Iterator[list[ChoiceUpdate]]:
        yield from echo.ready()
        for updates in self._read():
            echo.take(updates, self.prompt_scores)
            yield from echo.ready()

    def _read(self) -> Iterator[list[ChoiceUpdate]]:
        for request in self._requests:
            while (updates := request.read()) is not None:
                if request.is_over and request in self._open:
                    self._open.remove(request)
                    if not request.has_ended:
                        self._release(request, FinishReason.STOP)  # before the yield, behind which the client may go
                if updates:
                    yield updates

    def leave(self, grace_seconds: float | None = None, then: Callable[[], None] = lambda: None) -> None:
        """Stop reading for the client, and withdraw what has not ended, after a grace time if one is given.

        Args:
            grace_seconds: How long the answer continues; meanwhile stop strings apply and other clients can attach.
            then: Called when this gateway has released the answer.
        """
        if grace_seconds is not None and not self.is_over:
            self.service.background.detach(self._go_on(grace_seconds, then))
        else:
            self._abandon()
            then()

    async def _go_on(self, grace_seconds: float, then: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(grace_seconds):
                await Reading(self, Sink()).to_end()
            self._abandon()
        except (TimeoutError, GatewayError):
            self._abandon()  # not when this gateway ends: then the store's own grace begins
        finally:
            then()

    def _abandon(self) -> None:
        for request in self._requests:
            if not request.is_over:
                request.record_end("cancelled")
                self._release(request, FinishReason.CANCELLED)

    def _release(self, request: "_RequestProgress", reason: FinishReason) -> None:
        release = self.service.client.submission.release(request.stream, reason, request.ended_at)
        self.service.background.start(release)


class _RequestProgress:
    """One request of the engine, with its choices by index."""

    def __init__(
        self,
        stream: Inbox,
        choices: Sequence[ChoiceProgress],
        best_of: BestOf | None,
        parsers: Mapping[int, MessageParser],
    ) -> None:
        """With `best_of` the choices are samples, which are ranked when all have ended. `parsers`: by choice."""
        self.stream = stream
        self.has_ended = False  # the engine has nothing more of it
        self.is_over = False  # so it is then, and when nothing more of it is wanted since a stop string was met
        self.ended_at = 0  # Unix seconds, once it is over
        self.cached_tokens = 0
        self._choices = choices
        self._best_of = best_of
        self._ranked: Iterator[list[ChoiceUpdate]] = iter(())  # once all samples have ended
        self.parsers = parsers

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    def has_all_tokens(self, choice: int) -> bool:
        return self._choices[choice].num_tokens >= self.stream.request.sampling.max_tokens

    @property
    def is_plain(self) -> bool:
        """Return whether read_plain() is allowed: one choice, without ranking or parsers."""
        return len(self._choices) == 1 and self._best_of is None and not self.parsers

    def read_plain(self) -> Sequence[ChoiceUpdate] | None:
        """read() of plain tokens behind which nothing waits; None: that is not so, and nothing is read."""
        event = self.stream.read_whole()
        if event is None:
            return None
        token_ids = event.token_ids
        choice = self._choices[0]
        if len(token_ids) == 1 and (update := choice.take_plain(token_ids[0])) is not None:
            return (update,)
        return choice.take(token_ids, None)  # which does not end it: there is no reason, and there are no stop strings

    def read(self) -> list[ChoiceUpdate] | None:
        """Return the updates of the stream's next event, or None if there is none now or the answer is complete."""
        updates = next(self._ranked, None) if self.is_over else self._next()
        if updates is None or not self.parsers:
            return updates
        return [parsed(update, self.parsers[update.index]) for update in updates]

    def _next(self) -> list[ChoiceUpdate] | None:
        if (event := self.stream.read()) is None:
            return None
        updates = self._take(event)
        if self._best_of is None:
            return updates
        self._best_of.hold(updates)
        if self.is_over:
            self._ranked = self._best_of.answers([choice.cumulative_logprob for choice in self._choices])
        return []

    def _take(self, event: StreamEvent) -> list[ChoiceUpdate]:
        if isinstance(event, TokenEvent):
            choice = self._choices[event.choice]
            if choice.finished:
                return []
            updates = choice.take(event.token_ids, event.finish_reason, event.logprobs)
            if choice.finished:
                stopped_early = any(choice.stopped_early for choice in self._choices)
                self.is_over = stopped_early and all(choice.finished for choice in self._choices)
                self.ended_at = int(time.time()) if self.is_over else 0
            return updates
        self.has_ended = self.is_over = True
        if isinstance(event, ErrorEvent):
            self.record_end("error")
            raise _error_of(event)
        return self._end(event)

    def record_end(self, reason: str) -> None:
        """Record the end of all choices that have none yet."""
        for choice in self._choices:
            if not choice.finished:
                choice.record_end(reason)

    def _end(self, event: FinishEvent) -> list[ChoiceUpdate]:
        self.cached_tokens = event.usage.cached_tokens
        self.ended_at = event.ended_at or int(time.time())  # a worker of before does not tell it
        if event.reason is FinishReason.CANCELLED:
            self.record_end("error")
            raise GenerationFailed("The request was cancelled by the server.", code="request_cancelled")
        return [update for choice in self._choices if not choice.finished for update in choice.take((), event.reason)]


def _best_of(request: CompletionRequest, first_choice: int) -> BestOf | None:
    if not request.choices.is_best_of:
        return None
    return BestOf(first_choice, request.n, show_logprobs=request.num_logprobs is not None)


def _counted_prompt_tokens(planned: Sequence[GenerationRequest], metrics: ModelMetrics) -> int:
    counts = [len(generation.prompt_token_ids) for generation in planned]
    for count in counts:
        metrics.prompt_tokens.observe(count)
    return sum(counts)


def _output_text(
    model: ServedModel, request: CompletionRequest, generation: GenerationRequest, keeps_marks: bool
) -> OutputText:
    fields = request.fields
    include_stop = bool(fields.include_stop_str_in_output)
    sampling = generation.sampling
    skip_special_tokens = fields.skip_special_tokens is not False and not keeps_marks
    eos_token_ids = frozenset[int]() if sampling.ignore_eos else model.eos_token_ids
    return OutputText(
        model.encoder.detokenizer(generation.prompt_token_ids, skip_special_tokens=skip_special_tokens),
        StopStrings(request.stops, include_in_output=include_stop),
        terminal_token_ids=eos_token_ids.union(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        include_stop_token=include_stop,
    )


def _error_of(event: ErrorEvent) -> GatewayError:
    if event.code is ErrorCode.QUEUE_TIMEOUT:
        return unavailable("needs_newer_worker" if event.message == NEEDS_NEWER_MESSAGE else "queue_timeout")
    if event.code is ErrorCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("The answer was not complete in the time that the request had.")
    if event.code is ErrorCode.REQUEST_FAILED:
        return GenerationFailed("The engine could not complete this request.")
    return InvalidRequest(f"The engine refused this request: {event.message}", code=event.code.value)
