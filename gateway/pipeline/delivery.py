"""Writes an answer to its client: updates of its choices as events of a stream, or collected into one body."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web
from msgspec import structs

from gateway.errors import GatewayError, InternalError
from gateway.http.event_numbers import EventNumbers
from gateway.http.event_stream import EventStream
from gateway.pipeline.answer_extras import AnswerExtras
from gateway.pipeline.continuous_usage import continuous_usage
from gateway.pipeline.generation import ChoiceUpdate, Generation
from gateway.pipeline.reading import Reading, Sink
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.response_format import NOTHING, Body, ChoiceResult, Extra, ResponseFormat, UsageCount
from gateway.text.parsers.message import whole_calls
from shared.messages import EncodedLogprobs, FinishReason

logger = logging.getLogger("gateway")
_Result = TypeVar("_Result")

_WRITE_BYTES = 16_384  # of an answer that is ahead of its client; then it is asked whether it keeps up
_FREED_SCORES = 1024  # at one time: 256,000 of a long request take 8 ms
_FREED_TOKENS = 256  # at one time: 1 ms at most, each with 20 log-probabilities
_BYTES_OF_VALUE = 8  # of a body, to tell how long it takes to make it: 1 us a token


class Work(Protocol):
    """RequestContext.work()."""

    async def __call__(self, num_bytes: int | None, work: Callable[[], _Result], *, may_refuse: bool) -> _Result: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer that was accepted, and how it is written."""

    work: Work
    completion: CompletionRequest
    generation: Generation
    response_format: ResponseFormat
    extras: AnswerExtras
    include_usage: bool
    numbers: EventNumbers | None = None  # of a kept answer's stream


class _Chunks:
    """Updates of choices -> the bytes of one write."""

    def __init__(self, reply: Reply) -> None:
        self.generation = reply.generation
        self._reply = reply
        self._format = reply.response_format
        self._numbers = reply.numbers
        self._extras = reply.extras or None
        self._counts = continuous_usage(reply.completion, reply.generation)
        self._is_plain = self._numbers is None and self._extras is None and self._counts is None  # nearly always
        self._begun: set[int] = set()

    @property
    def among(self) -> Callable[[Iterator[Sequence[ChoiceUpdate]]], Iterator[Sequence[ChoiceUpdate]]] | None:
        if self._counts is None or self._numbers is not None:  # what is numbered may not depend on what came together
            return None
        return self._counts.with_ends

    def begin(self) -> bytes:
        event = self._format.begin()
        return event if self._numbers is None else self._numbers.of_choice(0, event)

    def of(self, updates: Sequence[ChoiceUpdate]) -> bytes:
        return self._of(updates[0]) if len(updates) == 1 else b"".join(map(self._of, updates))

    def _of(self, update: ChoiceUpdate) -> bytes:
        is_text = update.reason is None and not update.reasoning and not update.tool_calls
        if is_text and self._is_plain and update.index in self._begun:  # as nearly all are
            return self._format.text(update)
        is_first = update.index not in self._begun
        events = self._first(update.index) if is_first else b""
        usage = None if self._counts is None else self._counts.with_tokens_of(update)
        if update.reasoning or update.tool_calls:
            events += self._format.delta(update, usage)
        extra = self._extras.of_chunk(update, is_first=is_first) if self._extras else None
        if update.reason is None:
            events += self._said(update, usage, extra)
        else:
            events += self._ended(update, usage, extra)
        return events if self._numbers is None else self._numbers.of_choice(update.index, events)

    def _first(self, index: int) -> bytes:
        self._begun.add(index)
        usage = None if self._counts is None else self._counts.so_far
        return self._format.first(index, self._extras.of_first_chunk() if self._extras else NOTHING, usage)

    def _said(self, update: ChoiceUpdate, usage: UsageCount | None, extra: Extra) -> bytes:
        """Return the content of a token; nothing if its reasoning or calls are all it has."""
        has_delta = update.reasoning or update.tool_calls
        if has_delta and not (update.text or update.logprobs or self._extras):
            return b""
        return self._format.text(update, usage, extra)

    def _ended(self, update: ChoiceUpdate, usage: UsageCount | None, extra: Extra) -> bytes:
        if self._counts is None and update.text:
            text = self._format.text(update, usage, extra)
            return text + self._format.finish(structs.replace(update, text="", logprobs=()))
        return self._format.finish(update, usage, extra)

    def last(self) -> bytes:
        closing = self._format.closing()
        usage = self._format.usage(self.generation.usage) if self._reply.include_usage else b""
        if self._numbers is None:
            return closing + usage + self._format.done
        return (
            self._numbers.of_choice(0, closing)
            + self._numbers.of_usage(usage)
            + self._numbers.of_end(self._format.done)
        )

    def error(self, error: GatewayError) -> bytes:
        event = self._format.error(error)
        return event if self._numbers is None else self._numbers.of_end(event)


class _LiveEvents(Sink):
    """Writes events as they come, in pieces if there are many."""

    def __init__(self, stream: EventStream, chunks: _Chunks) -> None:
        self._stream = stream
        self._chunks = chunks
        self.among = chunks.among
        self._data = b""

    def take(self, updates: Sequence[ChoiceUpdate]) -> bool:
        self._data += self._chunks.of(updates)
        return len(self._data) < _WRITE_BYTES or self.end_turn()

    def end_turn(self) -> bool:
        data, self._data = self._data, b""
        return self._stream.push(data)

    def take_whole(self, updates: Sequence[ChoiceUpdate]) -> bool:
        return self._stream.push(self._chunks.of(updates))

    async def caught_up(self) -> None:
        await self._stream.drain()


class _Collected(Sink):
    """Collects updates by choice, after the format has taken its part of them."""

    def __init__(self, num_choices: int, collect: Callable[[ChoiceUpdate], ChoiceUpdate]) -> None:
        self.updates: list[list[ChoiceUpdate]] = [[] for _ in range(num_choices)]
        self._collect = collect

    def take(self, updates: Sequence[ChoiceUpdate]) -> bool:
        for update in map(self._collect, updates):
            self.updates[update.index].append(update)
        return True


async def stream_reply(stream: EventStream, reply: Reply) -> web.StreamResponse:
    """Stream an accepted answer: sends the 200, and any later error as an event of the stream."""
    chunks = _Chunks(reply)
    await stream.open()
    try:
        if beginning := chunks.begin():
            await stream.write(beginning)
        try:
            await Reading(reply.generation, _LiveEvents(stream, chunks)).to_end()
            num_bytes = _num_bytes_of(reply) if reply.response_format.repeats_all else 0
            ending = await reply.work(num_bytes, chunks.last, may_refuse=False)
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
        _let_go(reply)
    return stream.response


async def collect_reply(reply: Reply) -> Body:
    """Return the whole body; a long one is assembled outside the event loop."""
    completion, generation = reply.completion, reply.generation
    collected = _Collected(len(completion.prompts) * completion.n, reply.response_format.collect)
    try:
        await Reading(generation, collected).to_end()
        await generation.scheduler.run(reply.extras.write_scores(generation.prompt_scores))
        work = partial(_body_of, reply, collected.updates, generation.usage)
        return await reply.work(_num_bytes_of(reply), work, may_refuse=False)
    finally:
        _let_go(reply, collected.updates)


def _let_go(reply: Reply, collected: Sequence[list[ChoiceUpdate]] = ()) -> None:
    """Free the memory of an answer that was sent or failed."""
    scores = reply.generation.prompt_scores if reply.generation.is_over else []  # a stream that goes on counts them
    if any(collected) or any(scores):
        reply.generation.service.background.start(_free(collected, scores))


async def _free(collected: Iterable[list[ChoiceUpdate]], scores: Iterable[dict[int, EncodedLogprobs]]) -> None:
    for parts in collected:
        for _ in _cleared(parts):
            await asyncio.sleep(0)
    for of_prompt in scores:
        while of_prompt:
            for _ in range(min(len(of_prompt), _FREED_SCORES)):
                of_prompt.popitem()
            await asyncio.sleep(0)


def _cleared(values: list[Any]) -> Iterator[None]:
    """Free in pieces: 16,000 tokens at once stop the event loop for milliseconds, in any thread."""
    while values:
        del values[-_FREED_TOKENS:]
        yield


def _num_bytes_of(reply: Reply) -> int:
    completion, generation = reply.completion, reply.generation
    num_values = generation.usage.completion_tokens * (1 if completion.num_logprobs is None else 20)
    num_values += sum(map(len, generation.prompt_scores)) * 20 * completion.n
    return num_values * _BYTES_OF_VALUE


def _body_of(reply: Reply, collected: list[list[ChoiceUpdate]], usage: UsageCount) -> Body:
    extra = reply.extras.of_answer()
    return reply.response_format.body(_results(reply, collected), usage, extra)


def _results(reply: Reply, collected: list[list[ChoiceUpdate]]) -> Iterator[ChoiceResult]:
    """Yield one choice after the other; each is freed before the next is made."""
    extras = reply.extras
    for index in range(len(collected)):
        parts, collected[index] = collected[index], []
        reason = next((part.finish_name for part in reversed(parts) if part.reason), FinishReason.STOP.value)
        try:
            yield ChoiceResult(
                index,
                "".join(part.text for part in parts),
                reason,
                reply.completion.num_logprobs is not None,
                parts[-1].stop_string if parts else None,
                extras.of_choice(index, [token_id for part in parts for token_id in part.token_ids]),
                "".join(part.reasoning for part in parts),
                whole_calls(call for part in parts for call in part.tool_calls),
                parts,
            )
        finally:
            for _ in _cleared(parts):
                pass
