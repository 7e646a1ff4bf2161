"""The choices of one answer, from acceptance to their last text, written within their key's time slices.

    answer = Answer(service, model, request, inboxes, arrived_at, metrics)
    answer.write_to(stage)                          # before the first event is read
    await AnswerLoop(answer, stream).to_end()
    answer.leave()                                  # always, at the end: withdraws what has not finished

It is created after the store accepted the answer's requests (one per prompt, with all its choices), so a refused
request costs no detokenizer or parser. A kept answer can be attached to many times and continues for a while after its
readers have left.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from gateway.errors import DeadlineExceeded, GatewayError, GenerationFailed, InvalidRequest
from gateway.fleet import unavailable
from gateway.metrics import ModelMetrics
from gateway.model_service import ModelService
from gateway.pipeline.answer_extras import PromptEcho
from gateway.pipeline.best_of import BestOf
from gateway.pipeline.choice_writer import Backlog, ChoiceDelta, ChoiceWriter, Scoring, Stage, Write
from gateway.pipeline.message_parsers import ParserStage, message_parsers, needs_special_tokens
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.response_format import UsageCount
from gateway.store.inbox import Inbox
from gateway.text.output_text import OutputText, StopStrings
from gateway.text.served_model import ServedModel
from gateway.work.loop_scheduler import KeyScheduler
from shared.capabilities import NEEDS_NEWER_MESSAGE
from shared.messages import (
    ErrorCode,
    ErrorEvent,
    FinishReason,
    GenerationRequest,
    TerminalEvent,
    TokenEvent,
)
from shared.model_files import Task

WRITE_BYTES = 16_384  # of an answer that is ahead of its client, before the output is asked whether it keeps up


class Answer:
    """Reads the inboxes of one answer, one per prompt, and passes the deltas of all choices to one stage."""

    __slots__ = (
        "_backlog", "_counts_tokens", "_echo", "_ended_at", "_may_reason", "_num_choices", "_open", "_prompt_tokens",
        "_prompts", "_stage", "is_over", "prompt_scores", "scheduler", "service",
    )  # fmt: skip

    def __init__(
        self,
        service: ModelService,
        model: ServedModel,
        request: CompletionRequest,
        inboxes: Sequence[Inbox],
        arrived_at: float,
        metrics: ModelMetrics,
        ended_at: int = 0,
    ) -> None:
        """`inboxes`: one per prompt; `ended_at`: Unix seconds, of an answer that has ended before."""
        prompts = [inbox.request.prompt_token_ids for inbox in inboxes]
        self.service = service
        self.scheduler: KeyScheduler = service.loop_scheduler.of(inboxes[0].request.tenant)
        self.prompt_scores = [inbox.prompt_logprobs for inbox in inboxes]  # by prompt; complete before its first delta
        self._ended_at = ended_at
        self._backlog: Backlog = deque()
        self._stage = Stage()
        self._echo = None
        if request.echo:
            self._echo = PromptEcho(model.encoder, request, prompts, self.prompt_scores, self._backlog)
        self._prompts = [
            _PromptChoices(model, request, inbox, first_choice, arrived_at, metrics)
            for first_choice, inbox in zip(itertools.count(0, request.n), inboxes, strict=False)
        ]
        self._open = set(self._prompts)
        self.is_over = False  # each choice has had its last delta
        self._counts_tokens = request.max_tokens != 0  # of 0 the engine makes one, which nobody sees
        self._num_choices = request.n
        self._may_reason = request.is_chat and model.reasoning is not None and not request.choices.is_best_of
        self._prompt_tokens = sum(map(len, prompts))
        for prompt in prompts:
            metrics.prompt_tokens.observe(len(prompt))

    def write_to(self, stage: Stage) -> None:
        """Set the last stage of all choices; what waits for an earlier one is dropped."""
        self._backlog.clear()
        self._stage, write = stage, stage.write
        if self._echo is not None:
            self._echo.next, write = write, self._echo.write
        for prompt in self._prompts:
            prompt.write_to(write)

    @property
    def usage(self) -> UsageCount:
        return UsageCount(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(prompt.num_tokens for prompt in self._prompts if self._counts_tokens),
            cached_tokens=sum(prompt.cached_tokens for prompt in self._prompts),
            reasoning_tokens=self._num_reasoning_tokens,
            ended_at=self._ended_at or max(prompt.ended_at for prompt in self._prompts),
        )

    def has_all_tokens(self, index: int) -> bool:
        """Whether a choice has as many tokens as it may have, so that its end is on its way. Not of ranked samples."""
        number, choice = divmod(index, self._num_choices)
        return self._prompts[number].has_all_tokens(choice)

    @property
    def _num_reasoning_tokens(self) -> int | None:
        """Not of ranked samples, whose text is read at one time."""
        if not self._may_reason:
            return None
        return sum(parser.num_reasoning_tokens for prompt in self._prompts for parser in prompt.parsers.values())

    def listen(self, listener: Callable[[], None]) -> None:
        """Set the callback for when write_ready() may have more; it runs in the receiving task and must not raise."""
        for prompt in self._prompts:
            prompt.inbox.on_ready = listener

    def write_ready(self, out: bytearray) -> Iterator[int]:
        """Write what is ready in parts, and yield after each. A call that is left early is continued by the next.

        Yields:
            The number of tokens of the part.

        Raises:
            GatewayError: If a choice fails.
        """
        if self._backlog:
            yield from self._write_backlog(out)
        for prompt in self._prompts:
            while not prompt.is_over and (event := prompt.inbox.read()) is not None:
                num_tokens = 1
                if isinstance(event, TokenEvent):
                    num_tokens, writer = len(event.token_ids), prompt.writers[event.choice]
                    writer.write(event, out)
                    if writer.finished and prompt.ends_early():
                        self._release(prompt, FinishReason.STOP)
                else:
                    self._finish(prompt, event, out)
                if prompt.is_over:
                    self._close(prompt)  # before the yield, after which the client may go
                yield num_tokens
                if self._backlog:
                    yield from self._write_backlog(out)
        if self._stage.holds_back:
            self._stage.flush(out)
        self.is_over = not self._open

    def _finish(self, prompt: "_PromptChoices", event: TerminalEvent, out: bytearray) -> None:
        try:
            prompt.finish(event, out)
        except GatewayError:
            self._stage.flush(out, is_last=True)  # the tokens before the error
            raise

    def leave(self, grace_seconds: float | None = None, then: Callable[[], None] | None = None) -> None:
        """Stop reading for the client, and withdraw what has not ended, after a grace time if one is given.

        Args:
            grace_seconds: How long the answer continues; meanwhile stop strings apply and other clients can attach.
            then: Called when this gateway has released the answer. Without it, this reader goes on only if no earlier
                one does, whose grace time is extended: of 2,000 readers that leave at once, one goes on.
        """
        if grace_seconds is not None and not self.is_over and (self._extend_grace(grace_seconds) or then):
            self.service.background.detach(self._go_on(then))
            return
        self._abandon()
        if then is not None:
            then()

    def _extend_grace(self, grace_seconds: float) -> bool:
        """Let the answer continue for at least this time. Returns whether no other reader goes on with it yet."""
        left, until = self.service.left_until, asyncio.get_running_loop().time() + grace_seconds
        is_first = self._request_id not in left
        left[self._request_id] = max(left.get(self._request_id, 0.0), until)
        return is_first

    @property
    def _request_id(self) -> str:
        return self._prompts[0].inbox.request_id

    async def _go_on(self, then: Callable[[], None] | None) -> None:
        left, clock = self.service.left_until, asyncio.get_running_loop().time
        try:
            with suppress(GatewayError):
                while not self.is_over and (until := left.get(self._request_id, 0.0)) > clock():
                    with suppress(TimeoutError):  # it may have been extended
                        async with asyncio.timeout_at(until):
                            await AnswerLoop(self).to_end()
            self._abandon()  # not when this gateway ends: then the store's own grace begins
        finally:
            left.pop(self._request_id, None)
            if then is not None:
                then()

    def _abandon(self) -> None:
        for prompt in self._prompts:
            if not prompt.is_over:
                prompt.record_end("cancelled")
                self._release(prompt, FinishReason.CANCELLED)

    def _close(self, prompt: "_PromptChoices") -> None:
        """Handle the end of a prompt."""
        self._open.remove(prompt)
        if prompt.best_of is not None:
            self._backlog.append((prompt.ranked(prompt.best_of), prompt.best_of.write))

    def _release(self, prompt: "_PromptChoices", reason: FinishReason) -> None:
        release = self.service.client.submission.release(prompt.inbox, reason, prompt.ended_at)
        self.service.background.start(release)

    def _write_backlog(self, out: bytearray) -> Iterator[int]:
        while self._backlog:
            deltas, write = self._backlog[0]
            for delta in deltas:
                if delta is not None:
                    write(delta, out)
                yield 1
            self._backlog.popleft()


class _PromptChoices:
    """The choices of one prompt, which are one request of the engine."""

    __slots__ = ("_outputs", "best_of", "cached_tokens", "ended_at", "inbox", "is_over", "parsers", "writers")

    def __init__(
        self,
        model: ServedModel,
        request: CompletionRequest,
        inbox: Inbox,
        first_choice: int,
        arrived_at: float,
        metrics: ModelMetrics,
    ) -> None:
        self.inbox = inbox
        self.is_over = False  # the engine has nothing more of it, or stop strings have ended its choices
        self.ended_at = 0  # Unix seconds, once it is over
        self.cached_tokens = 0
        self._outputs = range(first_choice, first_choice + request.n)
        spellings = model.encoder.spellings(by_id=bool(request.fields.return_tokens_as_token_ids))
        keeps_marks = needs_special_tokens(model, request)
        scoring = Scoring(
            every_token=not request.is_chat,
            is_ranked=request.choices.is_best_of,
            own_first=bool(request.fields.logprob_token_ids) and request.task is Task.GENERATE,
        )
        self.writers = [
            ChoiceWriter(
                index,
                _output_text(model, request, inbox.request, keeps_marks),
                spellings,
                metrics,
                arrived_at,
                priority_class=inbox.request.priority_class,
                scoring=scoring,
            )
            for index in range(first_choice, first_choice + inbox.request.sampling.n)
        ]
        self.best_of: BestOf | None = None  # its samples are the choices of the engine
        if request.choices.is_best_of:
            self.best_of = BestOf(first_choice, request.n, show_logprobs=request.num_logprobs is not None)
        planned = inbox.request
        self.parsers = message_parsers(  # by choice
            model, request, planned.prompt_token_ids, planned.request_id, first_choice
        )

    def write_to(self, write: Write) -> None:
        parsers = self.parsers
        outputs = [ParserStage(parsers[index], write).write if index in parsers else write for index in self._outputs]
        if self.best_of is not None:
            self.best_of.outputs = outputs
            outputs = [self.best_of.hold] * len(self.writers)
        for writer, output in zip(self.writers, outputs, strict=True):
            writer.next = output

    @property
    def num_tokens(self) -> int:
        return sum(writer.num_tokens for writer in self.writers)

    def has_all_tokens(self, choice: int) -> bool:
        return self.writers[choice].num_tokens >= self.inbox.request.sampling.max_tokens

    def ranked(self, best_of: BestOf) -> Iterator[ChoiceDelta]:
        return best_of.ranked([writer.cumulative_logprob for writer in self.writers])

    def ends_early(self) -> bool:
        """Record and return whether all choices have ended, one by a stop string, which the engine does not know."""
        if any(writer.stopped_early for writer in self.writers) and all(writer.finished for writer in self.writers):
            self.is_over, self.ended_at = True, int(time.time())
        return self.is_over

    def finish(self, event: TerminalEvent, out: bytearray) -> None:
        """Write the end of all choices that have none yet. Raise GatewayError if the request failed."""
        self.is_over = True
        if isinstance(event, ErrorEvent):
            self.record_end("error")
            raise _error_of(event)
        self.cached_tokens = event.usage.cached_tokens
        self.ended_at = event.ended_at or int(time.time())  # a worker of before does not tell it
        if event.reason is FinishReason.CANCELLED:
            self.record_end("error")
            raise GenerationFailed("The request was cancelled by the server.", code="request_cancelled")
        for writer in self.writers:
            if not writer.finished:
                writer.finish(event.reason, out)

    def record_end(self, reason: str) -> None:
        """Record the end of all choices that have none yet."""
        for writer in self.writers:
            if not writer.finished:
                writer.record_end(reason)


class Output(Protocol):
    """The part of OpenResponse that AnswerLoop uses."""

    def push(self, data: bytes) -> bool: ...

    async def drain(self) -> None: ...


class Ready(Protocol):
    """The part of Answer that AnswerLoop uses."""

    @property
    def scheduler(self) -> KeyScheduler: ...

    @property
    def is_over(self) -> bool: ...

    def listen(self, listener: Callable[[], None]) -> None: ...

    def write_ready(self, out: bytearray) -> Iterator[int]: ...


class AnswerLoop:
    """Writes an answer to its end.

    The task that receives events also writes them, because waking a task per answer took 6 us per token. The caller of
    to_end() only waits for the end, for an error, or for an output that does not keep up.
    """

    __slots__ = ("_answer", "_failure", "_is_done", "_is_waiting", "_output", "_scheduler", "_stopped")

    def __init__(self, answer: Ready, output: Output | None = None) -> None:
        """Create the loop; without `output` the stages write no bytes."""
        self._answer = answer
        self._output = output
        self._scheduler = answer.scheduler
        self._failure: Exception | None = None
        self._is_done = False  # to its end
        self._is_waiting = False  # for events; else for a time slice, or for to_end() to go on
        self._stopped = asyncio.get_running_loop().create_future()  # nothing is written until to_end() goes on

    async def to_end(self) -> None:
        """Write until the end. Raise GatewayError if a choice fails, and what a stage or the output raises."""
        self._answer.listen(self._on_ready)
        self._scheduler.open()
        try:
            while True:
                self._stopped, self._is_waiting = asyncio.get_running_loop().create_future(), True
                self._on_ready()
                await self._stopped
                if self._failure is not None:
                    self._raise_failure(self._failure)
                if self._is_done:
                    return
                if self._output is not None:
                    await self._output.drain()
        finally:
            self._stop()
            self._scheduler.close()
            self._answer.listen(_ignore)  # or the two would hold each other, and all that the request had

    def _raise_failure(self, failure: Exception) -> None:
        self._failure = None
        try:
            raise failure
        finally:
            del failure  # its frames have this one: a circle that holds the request for long

    def _stop(self) -> None:
        self._is_waiting = False
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _on_ready(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._scheduler.submit(self._write)

    def _write(self) -> bool:
        """Write until no event is ready, the output blocks, or the time slice ends; return whether more is ready."""
        if self._stopped.done():
            return False  # to_end() was left while this waited for its time slice
        out, num_tokens, is_over, keeps_up = bytearray(), 0, False, True
        try:
            try:
                for count in self._answer.write_ready(out):
                    num_tokens += count
                    if len(out) >= WRITE_BYTES and self._output is not None:
                        keeps_up = self._output.push(bytes(out))
                        out.clear()
                    is_over = num_tokens > 1 and self._scheduler.is_over  # most reads are of one token
                    if is_over or not keeps_up:
                        break
                else:
                    self._is_done = self._answer.is_over
            finally:
                if out and self._output is not None:
                    keeps_up = self._output.push(bytes(out)) and keeps_up
        except Exception as error:
            self._failure, keeps_up = error, False
        if self._is_done or not keeps_up:
            self._stop()
            return False
        self._is_waiting = not is_over
        return is_over


def _ignore() -> None:
    pass


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
        StopStrings(request.stops, include_in_output=include_stop) if request.stops else None,
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
