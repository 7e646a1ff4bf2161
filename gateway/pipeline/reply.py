"""Writes an answer to its client: deltas of its choices as events of a stream, or collected into one body."""

import itertools
import logging
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Protocol, TypeVar

from aiohttp import web
from msgspec import structs

from gateway.errors import GatewayError, InternalError
from gateway.http.event_numbers import EventNumbers
from gateway.http.open_response import OpenResponse
from gateway.pipeline.answer import Answer, AnswerLoop
from gateway.pipeline.answer_extras import AnswerExtras
from gateway.pipeline.choice_writer import ChoiceDelta, Stage
from gateway.pipeline.continuous_usage import ContinuousUsage, EndJoiner
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.response_format import NOTHING, Body, ChoiceResult, Extra, ResponseFormat, UsageCount
from gateway.text.parsers.message import ToolCallDelta, whole_calls
from shared.messages import FinishReason

logger = logging.getLogger("gateway")
_Result = TypeVar("_Result")

_BYTES_OF_VALUE = 8  # of a body, to tell how long it takes to make it: 1 us a token


class Work(Protocol):
    """RequestContext.work()."""

    def __call__(self, num_bytes: int | None, work: Callable[[], _Result]) -> Awaitable[_Result]: ...


class ChunkWriter(Stage):
    """The format stage of a stream: deltas become its events."""

    __slots__ = ("_adds_fields", "_begun", "_counts", "_extras", "_format", "_numbers")

    def __init__(
        self,
        response_format: ResponseFormat,
        extras: AnswerExtras | None,
        counts: ContinuousUsage | None = None,
        numbers: EventNumbers | None = None,
    ) -> None:
        self._format = response_format
        self._extras = extras
        self._counts = counts
        self._numbers = numbers
        self._adds_fields = counts is not None or numbers is not None or extras is not None
        self._begun: set[int] = set()  # choices

    def begin(self) -> bytes:
        event = self._format.begin()
        return event if self._numbers is None else self._numbers.of_choice(0, event)

    def write(self, delta: ChoiceDelta, out: bytearray) -> None:
        """Append the events of a delta, with the first ones of its choice before them."""
        is_content = delta.reason is None and not delta.reasoning and not delta.tool_calls
        if is_content and not self._adds_fields and delta.index in self._begun:  # nearly always
            out += self._format.text(delta)
            return
        events = self._events(delta)
        out += events if self._numbers is None else self._numbers.of_choice(delta.index, events)

    def _events(self, delta: ChoiceDelta) -> bytes:
        counts, extras = self._counts, self._extras
        events, is_first = b"", delta.index not in self._begun
        if is_first:
            self._begun.add(delta.index)
            so_far = None if counts is None else counts.so_far
            events = self._format.first(delta.index, NOTHING if extras is None else extras.of_first_chunk(), so_far)
        usage = None if counts is None else counts.with_tokens_of(delta)
        extra = None if extras is None else extras.of_chunk(delta, is_first=is_first)
        has_calls = bool(delta.reasoning or delta.tool_calls)
        if has_calls:
            events += self._format.delta(delta, usage)
        if delta.reason is not None:
            return events + self._ended(delta, usage, extra)
        if has_calls and extras is None and not (delta.text or delta.logprobs):
            return events
        return events + self._format.text(delta, usage, extra)

    def _ended(self, delta: ChoiceDelta, usage: UsageCount | None, extra: Extra) -> bytes:
        if self._counts is None and delta.text:
            text = self._format.text(delta, usage, extra)
            return text + self._format.finish(structs.replace(delta, text="", logprobs=()))
        return self._format.finish(delta, usage, extra)

    def last(self, usage: UsageCount | None) -> bytes:
        """Return the events after the last choice; with `usage` one of them shows it."""
        closing = self._format.closing()
        used = b"" if usage is None else self._format.usage(usage)
        if self._numbers is None:
            return closing + used + self._format.done
        numbers = self._numbers
        return numbers.of_choice(0, closing) + numbers.of_usage(used) + numbers.of_end(self._format.done)

    def error(self, error: GatewayError) -> bytes:
        event = self._format.error(error)
        return event if self._numbers is None else self._numbers.of_end(event)


class _Collected:
    """What has come of one choice, in few objects: 16,000 deltas would take milliseconds to free."""

    def __init__(self) -> None:
        self.text, self.reasoning = StringIO(), StringIO()
        self.token_ids = array("I")
        self.tool_calls: list[ToolCallDelta] = []
        self.finish_name = FinishReason.STOP.value
        self.stop_string: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.text.write(delta.text)
        self.reasoning.write(delta.reasoning)
        self.token_ids.extend(delta.token_ids)
        self.tool_calls += delta.tool_calls
        if delta.reason is not None:
            self.finish_name, self.stop_string = delta.finish_name, delta.stop_string


class Collector(Stage):
    """Collects the deltas of each choice, after the format has taken its part of them."""

    def __init__(self, num_choices: int, collect: Callable[[ChoiceDelta], ChoiceDelta]) -> None:
        self.choices = [_Collected() for _ in range(num_choices)]
        self._collect = collect

    def write(self, delta: ChoiceDelta, out: bytearray) -> None:
        """Keep the delta; nothing is sent before the body is complete."""
        self.choices[delta.index].add(self._collect(delta))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An answer that was accepted, and how it is written: stream() or collect(), once."""

    work: Work
    completion: CompletionRequest
    answer: Answer
    response_format: ResponseFormat
    extras: AnswerExtras | None
    include_usage: bool
    numbers: EventNumbers | None = None  # of a kept answer's stream

    async def stream(self, stream: OpenResponse) -> web.StreamResponse:
        """Stream the answer: sends the 200, and any later error as an event of the stream."""
        answer = self.answer
        counts = ContinuousUsage(self.completion, answer) if self.completion.continuous_usage else None
        chunks = ChunkWriter(self.response_format, self.extras, counts, self.numbers)
        # What is numbered may not depend on what came together, so its ends stay apart.
        answer.write_to(chunks if counts is None or self.numbers is not None else EndJoiner(answer, chunks))
        await stream.open()
        try:
            if beginning := chunks.begin():
                await stream.write(beginning)
            try:
                await AnswerLoop(answer, stream).to_end()
                last = partial(chunks.last, answer.usage if self.include_usage else None)
                num_bytes = self._num_bytes if self.response_format.repeats_all else 0
                ending = await self.work(num_bytes, last)
            except GatewayError as error:
                ending = chunks.error(error)
            except ConnectionError:
                raise  # the client has gone
            except Exception:  # in this answer's text, grammar, or format: only this answer ends
                logger.exception("answer: failed")
                ending = chunks.error(InternalError())
            await stream.end(ending)
        finally:
            stream.close()
            self._let_go()
        return stream.response

    async def collect(self) -> Body:
        """Return the complete body; a long one is assembled outside the event loop."""
        answer = self.answer
        collector = Collector(len(self.completion.prompts) * self.completion.n, self.response_format.collect)
        answer.write_to(collector)
        try:
            await AnswerLoop(answer).to_end()
            if self.extras is not None:
                await answer.scheduler.run(self.extras.write_scores(answer.prompt_scores))
            work = partial(self._body_of, collector.choices, answer.usage)
            return await self.work(self._num_bytes, work)
        finally:
            self._let_go()

    @property
    def _num_bytes(self) -> int:
        num_values = self.answer.usage.completion_tokens * (1 if self.completion.num_logprobs is None else 20)
        num_values += sum(map(len, self.answer.prompt_scores)) * 20 * self.completion.n
        return num_values * _BYTES_OF_VALUE

    def _body_of(self, collected: Sequence[_Collected], usage: UsageCount) -> Body:
        results = itertools.starmap(self._result, enumerate(collected))
        return self.response_format.body(results, usage, NOTHING if self.extras is None else self.extras.of_answer())

    def _result(self, index: int, collected: _Collected) -> ChoiceResult:
        return ChoiceResult(
            index,
            collected.text.getvalue(),
            collected.finish_name,
            self.completion.num_logprobs is not None,
            collected.stop_string,
            NOTHING if self.extras is None else self.extras.of_choice(index, collected.token_ids),
            collected.reasoning.getvalue(),
            whole_calls(collected.tool_calls),
        )

    def _let_go(self) -> None:
        """Free the stages of an answer that was sent or failed. One that goes on is read without them."""
        self.answer.write_to(Stage())
