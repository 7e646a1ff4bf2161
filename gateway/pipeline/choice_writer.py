"""One choice of an answer: token events in, deltas of text out to the stages that write them.

    writer = ChoiceWriter(...)
    writer.next = stage.write          # fixed before the first event is read
    writer.write(event, out)           # TokenEvent -> ChoiceDelta -> bytes in `out`
    writer.finish(reason, out)         # once, unless a stop string or the event's own reason ended the choice

Every answer takes this path. It only has the stages that its request needs: detokenization and stop strings here, then
a parser (message_parsers.py), ranking (best_of.py), the prompt's echo (answer_extras.py), joined ends
(continuous_usage.py), and the format (reply.py). Most answers have the first and the last.

The classes that each token passes have __slots__: with 1,000 streams their objects are not in the CPU caches, and a
token costs 5 % less if each is one block of memory.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from gateway.metrics import ModelMetrics
from gateway.text.logprobs import LogprobEntry, with_own_first
from gateway.text.output_text import OutputText
from gateway.text.parsers.message import ToolCallDelta
from gateway.text.token_spellings import TokenSpellings
from shared.messages import EncodedLogprobs, FinishReason, TokenEvent, decoded_logprobs

_Tokens: TypeAlias = tuple[tuple[int, ...], tuple[LogprobEntry, ...]]  # ids, and the log-probabilities of each
_NOTHING: _Tokens = ((), ())


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):
    """New text of one choice, usually of one token. A Struct is made in a fifth of the time of a frozen dataclass."""

    index: int
    text: str
    reason: FinishReason | None  # set once, in the choice's last delta
    logprobs: tuple[LogprobEntry, ...] = ()
    token_ids: tuple[int, ...] = ()  # all that were consumed, whether or not they have text
    # Where a parser reads the text (gateway/text/parsers), `text` is the content alone, and the rest is here.
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    called_tools: bool = False  # in the last delta
    stop_string: str | None = None  # that ended it; only in the last delta

    @property
    def finish_name(self) -> str:
        """The API's finish reason; the engine has none for tool calls."""
        assert self.reason is not None
        return "tool_calls" if self.called_tools and self.reason is FinishReason.STOP else self.reason.value


Write: TypeAlias = Callable[[ChoiceDelta, bytearray], None]  # passes a delta on, or appends its bytes
# Long work of stages, done in pieces before the next event is read; None: a piece without a delta.
Backlog: TypeAlias = deque[tuple[Iterator[ChoiceDelta | None], Write]]


class Scoring(msgspec.Struct, frozen=True, gc=False):
    """How a choice's log-probabilities are reported.

    Attributes:
        every_token: The end-of-sequence token, which has no text, has log-probabilities too.
        is_ranked: `ChoiceWriter.cumulative_logprob` is computed; otherwise it stays 0.
        own_first: Each token comes before the tokens that the request named, as in vLLM.
    """

    every_token: bool
    is_ranked: bool
    own_first: bool


class Stage:
    """The last stage of all choices of an answer; this base class discards the deltas."""

    __slots__ = ()
    holds_back = False  # flush() must be called

    def write(self, delta: ChoiceDelta, out: bytearray) -> None:
        """Append the bytes of a delta, if any."""

    def flush(self, out: bytearray, *, is_last: bool = False) -> None:
        """Write what may not wait longer: no event is ready now, or none follows if `is_last`."""


class ChoiceWriter:
    __slots__ = (
        "_arrived_at", "_first_token_at", "_held", "_index", "_last_token_at", "_metrics", "_output",
        "_priority_class", "_scoring", "_spellings", "cumulative_logprob", "finished", "next", "stopped_early",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        output: OutputText,
        spellings: TokenSpellings,
        metrics: ModelMetrics,
        arrived_at: float,
        *,
        priority_class: str,
        scoring: Scoring,
    ) -> None:
        """Create the writer of one choice of a request of `priority_class`, which arrived at `arrived_at`."""
        self.next: Write = Stage().write
        self.finished = False
        self.stopped_early = False  # by a stop string: the engine does not know of it
        self.cumulative_logprob = 0.0  # of the tokens consumed, if they come with log-probabilities
        self._index = index
        self._output = output
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._priority_class = priority_class
        self._first_token_at = 0.0
        self._last_token_at = 0.0
        self._spellings = spellings
        self._scoring = scoring
        self._held = _NOTHING  # a token that may have ended the sequence

    @property
    def num_tokens(self) -> int:
        return self._output.num_tokens

    def write(self, event: TokenEvent, out: bytearray) -> None:
        """Write a delta for each token, and one for the end if the event has a reason. Nothing follows the end.

        Every token has its delta, even without text yet, so clients can count and time tokens. A token that may have
        ended the sequence is in the next delta. The deltas do not depend on how tokens are grouped into events.
        """
        if self.finished:
            return
        token_ids, scores, reason, output = event.token_ids, event.logprobs, event.finish_reason, self._output
        if token_ids:
            now = time.monotonic()
            if self._first_token_at:
                self._metrics.inter_token_latency.observe(now - self._last_token_at)
            else:
                self._first_token_at = now
                self._metrics.time_to_first_token.labels(self._priority_class).observe(now - self._arrived_at)
            self._last_token_at = now
        for place, token_id in enumerate(token_ids):
            logprobs = scores[place] if scores else None
            num_tokens = output.num_tokens
            text = output.push(token_id)
            if self._held is _NOTHING and output.held_terminal is None and output.stop_string is None:  # nearly always
                entries = () if logprobs is None else self._entries(token_id, logprobs)
                self.next(ChoiceDelta(self._index, text, None, entries, (token_id,)), out)
                continue
            is_consumed = output.num_tokens > num_tokens  # unless the one held before completed a stop string
            sent_ids, entries = self._consumed_tokens(token_id, logprobs) if is_consumed else self._held
            if output.stop_string is not None:
                self.stopped_early = reason is None
                self._end(text, FinishReason.STOP, entries, sent_ids, out)
                return
            if sent_ids:
                self.next(ChoiceDelta(self._index, text, None, entries, sent_ids), out)
        if reason is not None:
            self.finish(reason, out)

    def finish(self, reason: FinishReason, out: bytearray) -> None:
        """Write the end of the choice."""
        text = self._output.finish(reason)
        held_ids, entries = self._held
        shown = entries if self._scoring.every_token or self._output.shows_terminal(reason) else ()
        self._end(text, FinishReason.STOP if self._output.stop_string is not None else reason, shown, held_ids, out)

    def record_end(self, reason: str) -> None:
        self.finished = True
        self._metrics.choices_finished.labels(reason).inc()

    def _entries(self, token_id: int, logprobs: EncodedLogprobs) -> tuple[LogprobEntry, ...]:
        """Return the entry of the token that was consumed last."""
        if self._scoring.is_ranked:
            self.cumulative_logprob += decoded_logprobs([logprobs])[0].logprob
        if self._scoring.own_first:
            logprobs = with_own_first(token_id, logprobs)
        return (LogprobEntry(token_id, logprobs, self._output.token_start, self._spellings),)

    def _consumed_tokens(self, token_id: int, logprobs: EncodedLogprobs | None) -> _Tokens:
        """Return the tokens that can be shown after one was consumed; a terminal one is held back, as its text is."""
        entries = () if logprobs is None else self._entries(token_id, logprobs)
        (held_ids, held_entries), self._held = self._held, _NOTHING
        if self._output.held_terminal is not None:
            self._held = (token_id,), entries
            return held_ids, held_entries
        return (*held_ids, token_id), (*held_entries, *entries)

    def _end(
        self,
        text: str,
        reason: FinishReason,
        logprobs: tuple[LogprobEntry, ...],
        token_ids: tuple[int, ...],
        out: bytearray,
    ) -> None:
        self.record_end(reason.value)
        self._metrics.generation_tokens.observe(self.num_tokens)
        if self.num_tokens > 1:
            self._metrics.time_per_output_token.observe(
                (self._last_token_at - self._first_token_at) / (self.num_tokens - 1)
            )
        self._metrics.request_duration.observe(time.monotonic() - self._arrived_at)
        stop_string = self._output.stop_string
        self.next(ChoiceDelta(self._index, text, reason, logprobs, token_ids, stop_string=stop_string), out)
