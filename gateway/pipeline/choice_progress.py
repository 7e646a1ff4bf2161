"""One choice of an answer: tokens to text updates with one end, and the measurements of its latency.

    ChoiceProgress     tokens -> ChoiceUpdates, each with the text that is certain so far
    BestOf             the likeliest of several samples, held until all have ended, best first

A sample's rank is the sum of its tokens' log-probabilities
before temperature and penalties (vLLM's cumulative_logprob).
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TypeAlias

import msgspec
from msgspec import structs

from gateway.metrics import ModelMetrics
from gateway.text.logprobs import LogprobEntry
from gateway.text.output_text import OutputText
from gateway.text.parsers.message import MessageParser, ToolCallDelta
from gateway.text.token_spellings import TokenSpellings
from shared.messages import EncodedLogprobs, FinishReason, decoded_logprobs

_Tokens: TypeAlias = tuple[tuple[int, ...], tuple[LogprobEntry, ...]]  # ids, and the log-probabilities of each
_NOTHING: _Tokens = ((), ())


class ChoiceUpdate(msgspec.Struct, frozen=True, gc=False):
    """One update, usually one token. A Struct is made in a fifth of the time of a frozen dataclass."""

    index: int
    text: str
    reason: FinishReason | None  # set once, in the choice's last update
    logprobs: tuple[LogprobEntry, ...] = ()
    token_ids: tuple[int, ...] = ()  # all that were consumed, whether or not they have text
    # Where a parser reads the text (gateway/text/parsers), `text` is the content alone, and the rest is here.
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    called_tools: bool = False  # in the last update
    stop_string: str | None = None  # that ended it; only in the last update

    @property
    def finish_name(self) -> str:
        """The API's finish reason; the engine has none for tool calls."""
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
        is_ranked: bool = False,
    ) -> None:
        """Follow one choice.

        If `scores_every_token`, the end-of-sequence token, which has no text, has log-probabilities too. If
        `is_ranked`, `cumulative_logprob` is computed; otherwise it stays 0.
        """
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
        self._is_ranked = is_ranked
        self._held = _NOTHING  # a token that may have ended the sequence

    @property
    def num_tokens(self) -> int:
        return self._output.num_tokens

    def take(
        self, token_ids: Sequence[int], reason: FinishReason | None, logprobs: Sequence[EncodedLogprobs] | None = None
    ) -> list[ChoiceUpdate]:
        """Return an update for each token, and one for the end if there is a `reason`. Do not call it after the end.

        Every token has its update, even without text yet, so clients can count and time tokens. A token that may have
        ended the sequence is in the next update. The updates do not depend on how tokens are grouped into calls.
        """
        if token_ids:
            self._record_tokens(time.monotonic())
        output = self._output
        updates: list[ChoiceUpdate] = []
        for token_id, token_logprobs in zip(token_ids, logprobs or repeat(None)):  # noqa: B905 - repeat() has no end
            num_tokens = output.num_tokens
            text = output.push(token_id)
            if self._held is _NOTHING and not (output.stopped or output.holds_terminal):  # nearly always
                entries = () if token_logprobs is None else self._entries(token_id, token_logprobs)
                updates.append(ChoiceUpdate(self._index, text, None, entries, (token_id,)))
                continue
            is_consumed = output.num_tokens > num_tokens  # unless the one held before completed a stop string
            sent_ids, entries = self._consumed_tokens(token_id, token_logprobs) if is_consumed else self._held
            if output.stopped:
                self.stopped_early = reason is None
                return [*updates, self._end(text, FinishReason.STOP, entries, sent_ids)]
            if sent_ids:
                updates.append(ChoiceUpdate(self._index, text, None, entries, sent_ids))
        if reason is None:
            return updates
        text = self._output.finish(reason)
        held_ids, entries = self._held
        shown = entries if self._scores_every_token or self._output.shows_terminal(reason) else ()
        reason = FinishReason.STOP if self._output.stopped else reason
        return [*updates, self._end(text, reason, shown, held_ids)]

    def take_plain(self, token_id: int) -> ChoiceUpdate | None:
        """Take one plain token, as nearly all are; return None and take nothing if it may end the text or be held."""
        text = self._output.push_plain(token_id)
        if text is None:
            return None
        self._record_tokens(time.monotonic())
        return ChoiceUpdate(self._index, text, None, (), (token_id,))

    def record_end(self, reason: str) -> None:
        self.finished = True
        self._metrics.choices_finished.labels(reason).inc()

    def _entries(self, token_id: int, logprobs: EncodedLogprobs) -> tuple[LogprobEntry, ...]:
        """Return the entry of the token that was consumed last."""
        if self._is_ranked:
            self.cumulative_logprob += decoded_logprobs([logprobs])[0].logprob
        return (LogprobEntry(token_id, logprobs, self._output.token_start, self._spellings),)

    def _consumed_tokens(self, token_id: int, logprobs: EncodedLogprobs | None) -> _Tokens:
        """Return the tokens that can be shown after one was consumed; a terminal one is held back, as its text is."""
        entries = () if logprobs is None else self._entries(token_id, logprobs)
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


class BestOf:
    def __init__(self, first_choice: int, num_choices: int, *, show_logprobs: bool) -> None:
        """`first_choice`: index of the best one in the answer."""
        self._first_choice = first_choice
        self._num_choices = num_choices
        self._show_logprobs = show_logprobs
        self._held: dict[int, list[ChoiceUpdate]] = {}  # by index of the sample, counted from first_choice too

    def hold(self, updates: Iterable[ChoiceUpdate]) -> None:
        for update in updates:
            self._held.setdefault(update.index - self._first_choice, []).append(update)

    def answers(self, cumulative_logprobs: Sequence[float]) -> Iterator[list[ChoiceUpdate]]:
        """Yield the choices, best first; the earlier of equal ones first.

        A choice is one update. With log-probabilities, which take 40 us per token to write, the updates stay separate.

        Args:
            cumulative_logprobs: By sample.
        """
        ranked = sorted(self._held, key=lambda sample: -cumulative_logprobs[sample])
        for rank, sample in enumerate(ranked[: self._num_choices]):
            index, updates = self._first_choice + rank, self._held[sample]
            if self._show_logprobs:
                yield from ([structs.replace(update, index=index)] for update in updates)
            else:
                yield [_as_one(index, updates)]


def _as_one(index: int, updates: Sequence[ChoiceUpdate]) -> ChoiceUpdate:
    """Without log-probabilities."""
    text = "".join(update.text for update in updates)
    token_ids = tuple(token_id for update in updates for token_id in update.token_ids)
    last = updates[-1]
    return ChoiceUpdate(index, text, last.reason, (), token_ids, stop_string=last.stop_string)


def parsed(update: ChoiceUpdate, parser: MessageParser) -> ChoiceUpdate:
    delta = parser.push(update.text, num_tokens=len(update.token_ids), is_last=update.reason is not None)
    return structs.replace(
        update,
        text=delta.content,
        reasoning=delta.reasoning,
        tool_calls=delta.tool_calls,
        called_tools=update.reason is not None and parser.num_calls > 0,
    )
