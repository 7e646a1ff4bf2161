r"""The text of one choice: token ids in, text out, with stop strings and end-of-sequence tokens handled. Pure.

    text = OutputText(detokenizer, StopStrings(["\n\n"]), terminal_token_ids=frozenset({2}))
    text.push(318)             # -> " is": the text that is certain by now
    text.stop_string           # not None after a stop string: stop generating
    text.finish(reason)        # -> the rest

Held back: bytes of an incomplete character (by the detokenizer), text that may become a stop string, and an
end-of-sequence token until it is known whether it ended the sequence. For byte-level vocabularies (GPT-2's alphabet, as
in most models) the text of a token is looked up and only parts of characters are decoded, 0.2 us per token. Other
tokenizers have rules at word boundaries and use the stream of `tokenizers`, which takes 5 us.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gateway.text.token_spellings import bytes_of_spelling
from shared.messages import FinishReason

# A character has at most four bytes and a byte-level token at least one; longer pending bytes are invalid UTF-8.
_MAX_PENDING_TOKENS = 8
_PRIMING_TOKENS = 6  # prompt tokens as context for decoders that strip the space of a text's first word


class ByteLevelVocabulary:
    """Text of each id, or its bytes if they are not whole characters; shared by all streams of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build the table: 0.2 s for 50,000 tokens. Built lazily, the first use of each would cost ten times more."""
        self._all = {id_: _piece_of(spelling) for spelling, id_ in tokenizer.get_vocab().items()}
        special_ids = [id_ for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special]
        self._without_special = self._all | dict.fromkeys(special_ids, "")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ByteLevelVocabulary | None":
        """Return the vocabulary if the decoder is exactly ByteLevel, or None: other decoders may strip or replace."""
        decoder = tokenizer.decoder
        if decoder is None or json.loads(decoder.__getstate__()).get("type") != "ByteLevel":
            return None
        return cls(tokenizer)

    def detokenizer(self, *, skip_special_tokens: bool) -> "ByteLevelDetokenizer":
        return ByteLevelDetokenizer(self._without_special if skip_special_tokens else self._all)


class ByteLevelDetokenizer:
    """Detokenizer for byte-level vocabularies; the joined text equals decoding all ids at once, U+FFFD included."""

    __slots__ = ("_open", "_pieces_by_id")

    def __init__(self, pieces_by_id: Mapping[int, str | bytes]) -> None:
        self._pieces_by_id = pieces_by_id
        self._open = b""  # start of an incomplete character

    def push(self, token_id: int) -> str:
        piece = self._pieces_by_id.get(token_id, "")  # ids beyond the tokenizer have no text
        if not self._open and isinstance(piece, str):
            return piece
        data = self._open + (piece.encode() if isinstance(piece, str) else piece)
        text, num_bytes = codecs.utf_8_decode(data, "replace")
        self._open = data[num_bytes:]
        return text

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._open, "replace", True)
        self._open = b""
        return text


def _piece_of(spelling: str) -> str | bytes:
    data = bytes_of_spelling(spelling)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class IncrementalDetokenizer:
    """Detokenizer for any tokenizer; the joined text equals decoding all ids at once, U+FFFD included."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pending: list[int] = []
        self._stream = self._primed(prompt_token_ids[-_PRIMING_TOKENS:])

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises Exception("Invalid prefix ...") if a prefix decodes differently
            return self.flush()
        if text is not None:
            self._pending.clear()
            return text
        # Each step decodes all pending tokens, so unbounded invalid bytes would cost quadratic time.
        return self.flush() if len(self._pending) >= _MAX_PENDING_TOKENS else ""

    def flush(self) -> str:
        """Return the text that is held back."""
        text = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip_special_tokens)
        self._pending.clear()
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        return str(text)

    def _primed(self, token_ids: Sequence[int]) -> DecodeStream:
        ids = list(token_ids)
        if self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens).endswith("\ufffd"):
            ids = []  # the prompt ends within a character, whose bytes must not appear in the output
        return DecodeStream(ids=ids, skip_special_tokens=self._skip_special_tokens)


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopStrings:
    """Finds the stop string that completes first, however the text is cut."""

    def __init__(self, stops: Iterable[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is certain and the stop string that was found."""
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, end = found
            self._held = ""
            return text[: end if self._include_in_output else start], text[start:end]
        certain = len(text) - self._open_length(text)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """Return the match with the earliest end, then the earliest start, as character-wise reading finds it."""
        matches = [(text.find(stop), len(stop)) for stop in self._stops]
        ends = [(start + length, start) for start, length in matches if start >= 0]
        if not ends:
            return None
        end, start = min(ends)
        return start, end

    def _open_length(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class OutputText:
    __slots__ = (
        "_detokenizer", "_include_stop_token", "_min_tokens", "_num_characters", "_stops", "_terminal_token_ids",
        "held_terminal", "num_tokens", "stop_string", "token_start",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
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
        self.held_terminal: int | None = None  # a last token that may not have ended this sequence
        self.num_tokens = 0  # consumed, including the one that completed a stop string
        self.token_start = 0  # offset of the last token in the text, in characters, held-back text included
        self.stop_string: str | None = None  # that was found
        self._num_characters = 0

    def shows_terminal(self, reason: FinishReason) -> bool:
        """Return whether the token that ended the sequence is part of the text."""
        return reason is not FinishReason.STOP or self._include_stop_token

    def push(self, token_id: int) -> str:
        """Consume a token and return text that became certain; after a stop string nothing is consumed."""
        released = "" if self.held_terminal is None else self._release(self.held_terminal)
        if self.stop_string is not None:
            return released
        self.num_tokens += 1
        self.token_start = self._num_characters
        if token_id in self._terminal_token_ids:
            self.held_terminal = token_id
            return released
        text = self._detokenizer.push(token_id)
        self._num_characters += len(text)
        if self._stops is not None:
            text = self._through(self._stops, text)
        return released + text if released else text

    def finish(self, reason: FinishReason) -> str:
        """Return the text still held back; empty after a stop string."""
        if self.stop_string is not None:
            return ""
        text = ""
        if self.held_terminal is not None and self.shows_terminal(reason):
            text = self._release(self.held_terminal)
            if self.stop_string is not None:
                return text
        rest = self._detokenizer.flush()
        if self._stops is not None:
            rest = self._through(self._stops, rest)
            if self.stop_string is None:
                rest += self._stops.flush()
        return text + rest

    def _release(self, terminal_id: int) -> str:
        """Return the text of the held token, which did not end the sequence or is shown."""
        self.held_terminal = None
        text = self._detokenizer.push(terminal_id)
        self._num_characters += len(text)
        return text if self._stops is None else self._through(self._stops, text)

    def _through(self, stops: StopStrings, text: str) -> str:
        if self.num_tokens <= self._min_tokens:  # a stop string may not even begin
            return text
        certain, self.stop_string = stops.push(text)
        return certain
