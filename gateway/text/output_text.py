"""The text of one choice: token ids in, text out, with stop strings and the end of sequence taken care of. Pure.

    text = OutputText(detokenizer, StopStrings(["\\n\\n"]), terminal_token_ids=frozenset({2}))
    text.push(318)             # -> " is": what is certain by now
    text.stopped               # a stop string was met: stop generating
    text.finish(reason)        # -> the rest

Held back: bytes of an unfinished character (the detokenizer does that), text that may become a stop string, and a token
that ends sequences until it is known whether it ended this one. Knows nothing of events or JSON.
"""

from collections.abc import Iterable
from typing import Protocol

from shared.messages import FinishReason


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopStrings:
    """Finds the stop string that is complete first, whatever the pieces in which the text comes."""

    def __init__(self, stops: Iterable[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self.is_empty = not self._stops
        self._include_in_output = include_in_output
        self._held = ""
        self.found: str | None = None  # the one that was met

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain, whether a stop string was met)."""
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, end = found
            self._held = ""
            self.found = text[start:end]
            return text[: end if self._include_in_output else start], True
        certain = len(text) - self._open_length(text)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """Earliest end, then earliest start: what reading character by character finds."""
        matches = [(text.find(stop), len(stop)) for stop in self._stops]
        ends = [(start + length, start) for start, length in matches if start >= 0]
        if not ends:
            return None
        end, start = min(ends)
        return start, end

    def _open_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class OutputText:
    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        *,
        terminal_token_ids: frozenset[int],
        min_tokens: int = 0,
        include_stop_token: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._terminal_token_ids = terminal_token_ids
        self._min_tokens = min_tokens
        self._include_stop_token = include_stop_token
        self._held_terminal: int | None = None
        self.num_tokens = 0  # consumed so far, the one that completed a stop string included
        self.token_start = 0  # characters of text, held back or not, before the last token
        self.stopped = False
        self._num_characters = 0

    @property
    def holds_terminal(self) -> bool:
        """The last token ends sequences, and it is not known yet whether it ended this one."""
        return self._held_terminal is not None

    @property
    def stop_string(self) -> str | None:
        """The one that was met."""
        return self._stops.found

    def shows_terminal(self, reason: FinishReason) -> bool:
        """Whether a token that ended the sequence is text of the output."""
        return reason is not FinishReason.STOP or self._include_stop_token

    def push(self, token_id: int) -> str:
        """Nothing is consumed behind a stop string."""
        released = "" if self._held_terminal is None else self._release_terminal()
        if self.stopped:
            return released
        self.num_tokens += 1
        self.token_start = self._num_characters
        if token_id in self._terminal_token_ids:
            self._held_terminal = token_id
            return released
        return released + self._text_of(token_id)

    def finish(self, reason: FinishReason) -> str:
        """The text still held back; empty after a stop string."""
        if self.stopped:
            return ""
        pieces = []
        if self.shows_terminal(reason):
            pieces.append(self._release_terminal())
        if not self.stopped:
            pieces.append(self._through_stops(self._detokenizer.flush()))
        if not self.stopped:
            pieces.append(self._stops.flush())
        return "".join(pieces)

    def _release_terminal(self) -> str:
        """The held token did not end the sequence, or shall be seen: its text."""
        held, self._held_terminal = self._held_terminal, None
        return "" if held is None else self._text_of(held)

    def _text_of(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        self._num_characters += len(text)
        return self._through_stops(text)

    def _through_stops(self, text: str) -> str:
        # Within the tokens that must come, a stop string may not even begin.
        if self._stops.is_empty or self.num_tokens <= self._min_tokens:
            return text
        certain, self.stopped = self._stops.push(text)
        return certain
