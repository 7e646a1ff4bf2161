"""One choice of an answer: its tokens in, its text and its one end out, and what is measured on the way.

Knows nothing of streams, HTTP or JSON.
"""

import time
from collections.abc import Sequence
from itertools import repeat
from typing import TypeAlias

import msgspec

from gateway.metrics import ModelMetrics
from gateway.parsing.message import ToolCallDelta
from gateway.text.logprobs import LogprobEntry
from gateway.text.output_text import OutputText
from gateway.text.token_spellings import TokenSpellings
from shared.messages import FinishReason, TokenLogprobs

_Tokens: TypeAlias = tuple[tuple[int, ...], tuple[LogprobEntry, ...]]  # ids, and what is told of each
_NOTHING: _Tokens = ((), ())


class ChoiceUpdate(msgspec.Struct, frozen=True, gc=False):
    """One a token: made in a fifth of the time of a frozen dataclass."""

    index: int
    text: str
    reason: FinishReason | None  # set once, in the choice's last update
    logprobs: tuple[LogprobEntry, ...] = ()
    token_ids: tuple[int, ...] = ()  # all that were consumed, whether or not they have text
    # Where a parser reads the text (gateway/parsing), `text` is the content alone, and the rest is here.
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    called_tools: bool = False  # in the last update
    stop_string: str | None = None  # that ended it; only in the last update

    @property
    def finish_name(self) -> str:
        """The API's word for the end: that of a call is none of the engine's."""
        assert self.reason is not None
        return "tool_calls" if self.called_tools and self.reason is FinishReason.STOP else self.reason.value


class ChoiceProgress:
    def __init__(
        self,
        index: int,
        output: OutputText,
        spellings: TokenSpellings,
        metrics: ModelMetrics,
        arrived_at: float,
        *,
        scores_every_token: bool = False,
    ) -> None:
        """`scores_every_token`: log-probabilities also of the token that ends the sequence and has no text."""
        self.finished = False
        self.stopped_early = False  # by a stop string: the engine does not know of it
        self.cumulative_logprob = 0.0  # of the tokens consumed, if they come with log-probabilities
        self._index = index
        self._output = output
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._first_token_at = 0.0
        self._last_token_at = 0.0
        self._spellings = spellings
        self._scores_every_token = scores_every_token
        self._held = _NOTHING  # a token that may have ended the sequence

    @property
    def num_tokens(self) -> int:
        return self._output.num_tokens

    def take(
        self, token_ids: Sequence[int], reason: FinishReason | None, logprobs: Sequence[TokenLogprobs] | None = None
    ) -> list[ChoiceUpdate]:
        """An update for each of the next tokens, and one for their end if there is a `reason`. Not to be called after
        the end. A client that counts or times tokens sees each, also when several came together or one has no text yet;
        one that may have ended the sequence is in the update behind it. However tokens are grouped, the updates are the
        same."""
        if token_ids:
            self._record_tokens(time.monotonic())
        updates: list[ChoiceUpdate] = []
        for token_id, token_logprobs in zip(token_ids, logprobs or repeat(None)):  # noqa: B905 - repeat() has no end
            num_tokens = self._output.num_tokens
            text = self._output.push(token_id)
            is_consumed = self._output.num_tokens > num_tokens  # unless the one held before completed a stop string
            told_ids, entries = self._told(token_id, token_logprobs) if is_consumed else self._held
            if self._output.stopped:
                self.stopped_early = reason is None
                return [*updates, self._end(text, FinishReason.STOP, entries, told_ids)]
            if told_ids:
                updates.append(ChoiceUpdate(self._index, text, None, entries, told_ids))
        if reason is None:
            return updates
        text = self._output.finish(reason)
        held_ids, entries = self._held
        shown = entries if self._scores_every_token or self._output.shows_terminal(reason) else ()
        reason = FinishReason.STOP if self._output.stopped else reason
        return [*updates, self._end(text, reason, shown, held_ids)]

    def record_end(self, reason: str) -> None:
        self.finished = True
        self._metrics.choices_finished.labels(reason).inc()

    def _told(self, token_id: int, logprobs: TokenLogprobs | None) -> _Tokens:
        """What can be told after a token was consumed: a terminal one is held back, as its text is."""
        entries: tuple[LogprobEntry, ...] = ()
        if logprobs is not None:
            self.cumulative_logprob += logprobs.logprob
            entries = (LogprobEntry(token_id, logprobs, self._output.token_start, self._spellings),)
        (held_ids, held_entries), self._held = self._held, _NOTHING
        if self._output.holds_terminal:
            self._held = (token_id,), entries
            return held_ids, held_entries
        return (*held_ids, token_id), (*held_entries, *entries)

    def _end(
        self, text: str, reason: FinishReason, logprobs: tuple[LogprobEntry, ...], token_ids: tuple[int, ...]
    ) -> ChoiceUpdate:
        self.record_end(reason.value)
        self._metrics.generation_tokens.observe(self.num_tokens)
        if self.num_tokens > 1:
            self._metrics.time_per_output_token.observe(
                (self._last_token_at - self._first_token_at) / (self.num_tokens - 1)
            )
        self._metrics.request_duration.observe(time.monotonic() - self._arrived_at)
        stop_string = self._output.stop_string
        return ChoiceUpdate(self._index, text, reason, logprobs, token_ids, stop_string=stop_string)

    def _record_tokens(self, now: float) -> None:
        if self._first_token_at:
            self._metrics.inter_token_latency.observe(now - self._last_token_at)
        else:
            self._first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._arrived_at)
        self._last_token_at = now
