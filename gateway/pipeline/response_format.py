"""ResponseFormat, what an API writes as bytes ready to send; ChunkFormat, which two of OpenAI's APIs share. Pure.

Everything in a chunk but the text is known when a stream begins, so a chunk is a prepared prefix, the text as JSON, and
a prepared suffix: 0.5 us per token, a fifth of the time of encoding the whole object.

The order of a stream's chunks (each method returns whole Server-Sent Events):
    first(i)      chat: the role, once per choice        completions: nothing
    text(i, ...)  finish_reason null
    delta(i, ...) reasoning and tool calls, for chat
    finish(i, r)  once per choice, without text unless every chunk has its usage
    usage(u)      choices [], if include_usage; all other chunks then have usage null, or the usage so far
    DONE
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
from msgspec import structs

from gateway.errors import GatewayError
from gateway.http.sse import DONE, KEEP_ALIVE, error_event, event
from gateway.pipeline.choice_writer import ChoiceDelta
from gateway.text.logprobs import LogprobEntry
from gateway.text.long_json import GrownForm, json_pieces
from gateway.text.parsers.message import ToolCallDelta
from shared.messages import SamplingParams

Body: TypeAlias = bytes | bytearray  # a long one is put together in place: a copy of 28 MB takes 20 ms
Extra: TypeAlias = Mapping[str, Any] | None  # fields of a chunk's choice beyond OpenAI's
NOTHING: Mapping[str, Any] = MappingProxyType({})
# As vLLM has them in an answer that is not streamed, if they were not requested.
NO_PROMPT: Mapping[str, Any] = MappingProxyType({"prompt_logprobs": None, "prompt_token_ids": None})
_encode = msgspec.json.encode
_ENTRIES_AT_ONCE = 16  # a completion's cost 21 us each one by one, and 10 together
_SPLITTERS = (("\u2028", b"\\u2028"), ("\u2029", b"\\u2029"), ("\u0085", b"\\u0085"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHeader:
    """What is known of an answer before its first token.

    Attributes:
        response_id: Its id, without the prefix of an API.
        model: The model's name.
        created: When it was accepted, in Unix seconds.
        prompt_tokens: The length of all prompts.
        sampling: The sampling parameters in effect.
        repeated: What the API's schema says that the answer repeats of its request.
        system_fingerprint: Of the model's files and the release; "" is not shown.
        usage_in_chunks: Whether each chunk has `usage`, which is null but in the last.
    """

    response_id: str
    model: str
    created: int
    prompt_tokens: int = 0
    sampling: SamplingParams | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)
    system_fingerprint: str = ""
    usage_in_chunks: bool = False


@dataclass(slots=True)
class UsageCount:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # of the completion's; None: nothing tells them apart
    ended_at: int = 0  # Unix seconds; 0: not yet

    @property
    def all_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_object(self) -> dict[str, Any]:
        details = {} if self.reasoning_tokens is None else {"reasoning_tokens": self.reasoning_tokens}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.all_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        } | ({"completion_tokens_details": details} if details else {})


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    index: int
    text: str
    finish_reason: str
    has_logprobs: bool = False  # they were asked for; the format was given them as they came
    stop_string: str | None = None  # that ended it
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of the choice beyond OpenAI's
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()  # whole ones


class ResponseFormat:
    """Writes one answer. The defaults here write nothing."""

    prompt_in_choice = False  # whether prompt log-probabilities are in each choice, not beside them
    keep_alive = KEEP_ALIVE  # what a stream sends into silence
    stream_headers: Mapping[str, str] = NOTHING  # of a stream that is not Server-Sent Events, and so has no event ids
    repeats_all = False  # whether a stream's closing() and done say the whole answer once more

    @property
    def done(self) -> bytes:
        """The last event of a stream without an error."""
        raise NotImplementedError

    def begin(self) -> bytes:
        """Return what a stream begins with, before its first token."""
        return b""

    def first(self, index: int, extra: Mapping[str, Any] = NOTHING, usage: UsageCount | None = None) -> bytes:
        """Return what a choice begins with."""
        return b""

    def text(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        raise NotImplementedError

    def delta(self, update: ChoiceDelta, usage: UsageCount | None = None) -> bytes:
        """Return reasoning and tool calls of a choice that is parsed."""
        return b""

    def finish(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        """Return the end of a choice. It has text only if every chunk has its usage; `extra` belongs to the end."""
        return b""

    def closing(self) -> bytes:
        """Return what follows the last choice."""
        return b""

    def usage(self, usage: UsageCount) -> bytes:
        raise NotImplementedError

    def error(self, error: GatewayError) -> bytes:
        """Return the events that end a stream with an error."""
        raise NotImplementedError

    def collect(self, update: ChoiceDelta) -> ChoiceDelta:
        """Take an update of an answer that is not streamed; return what body() still needs of it.

        Log-probabilities are encoded here, in the key's time slices, so that body() only joins them.
        """
        return update

    def body(self, choices: Iterable[ChoiceResult], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> Body:
        """Return the whole body; `choices` is read once, in order; `extra` are top-level fields beyond OpenAI's."""
        raise NotImplementedError

    def unfinished(self, status: str, error: GatewayError | None = None) -> bytes:
        """Return the body of a background request that has no answer yet, or failed."""
        raise AssertionError("never in the background")


class ChunkFormat(ResponseFormat):
    """OpenAI's chunks, whose choices differ between its APIs."""

    chunk_object: str
    body_object: str
    id_prefix: str
    done = DONE
    before_text: str  # of a choice, up to the text's value
    after_text: str

    def __init__(self, header: ReplyHeader) -> None:
        self._head = {
            "id": self.id_prefix + header.response_id, "created": header.created, "model": header.model
        }  # fmt: skip
        if header.system_fingerprint:
            self._head["system_fingerprint"] = header.system_fingerprint
        head = _encode({**self._head, "object": self.chunk_object})[:-1].decode()
        self._usage_in_chunks = header.usage_in_chunks
        self._chunk_head = f"data: {head}".encode()
        self._text_prefixes: dict[int, bytes] = {}
        self._collected: dict[int, GrownForm] = {}  # log-probabilities, by choice
        self._waiting: dict[int, list[LogprobEntry]] = {}  # those that are not written yet
        self._no_usage = b',"usage":null' if header.usage_in_chunks else b""
        self._text_suffix = self.after_text.encode() + b"]" + self._no_usage + b"}\n\n"

    @staticmethod
    def logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        raise NotImplementedError

    @staticmethod
    def last_content(text: str) -> dict[str, Any]:
        """Return the field that holds text in a choice's last chunk."""
        raise NotImplementedError

    def finish(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        shown = self.logprobs(update.logprobs) if update.logprobs else None
        end = {"logprobs": shown, "finish_reason": update.finish_name}
        choice = {"index": update.index, **self.last_content(update.text), **end}
        return self._chunk([{**choice, **(extra or {})}], None if usage is None else usage.as_object())

    def text(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        prefix = self._text_prefixes.get(update.index)
        if prefix is None:
            prefix = self._chunk_head + f',"choices":[{{"index":{update.index},{self.before_text}'.encode()
            self._text_prefixes[update.index] = prefix
        if usage is None and not update.logprobs and not extra:
            return prefix + json_text(update.text) + self._text_suffix
        after = self.after_text.encode()
        if update.logprobs:
            after = after.replace(b"null", one_line(_encode(self.logprobs(update.logprobs))), 1)
        if extra:
            after = after[:-1] + b"," + one_line(_encode(extra))[1:]
        counted = self._no_usage if usage is None else b',"usage":' + _encode(usage.as_object())
        return prefix + json_text(update.text) + after + b"]" + counted + b"}\n\n"

    def collect(self, update: ChoiceDelta) -> ChoiceDelta:
        index, logprobs = update.index, update.logprobs
        if logprobs:
            self._waiting.setdefault(index, []).extend(logprobs)
        if index in self._waiting and (update.reason is not None or len(self._waiting[index]) >= _ENTRIES_AT_ONCE):
            self._grown(index)
        return structs.replace(update, logprobs=()) if logprobs else update

    def _grown(self, index: int) -> GrownForm:
        """With all that waited."""
        if index not in self._collected:
            self._collected[index] = GrownForm(self.logprobs(()))
        if index in self._waiting:
            self._collected[index].extend(self.logprobs(self._waiting.pop(index)))
        return self._collected[index]

    def usage(self, usage: UsageCount) -> bytes:
        return self._chunk([], usage.as_object())

    def error(self, error: GatewayError) -> bytes:
        return error_event(error.body()) + DONE

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        extra: Mapping[str, Any] = NOTHING,
    ) -> bytes:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices, **extra}
        if self._usage_in_chunks or usage is not None:
            chunk["usage"] = usage
        return event(_encode(chunk))

    def _body(self, choices: Iterable[dict[str, Any]], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> Body:
        """In pieces: at one time 28 MB of log-probabilities keep the interpreter for 21 ms."""
        body = bytearray(_encode({**self._head, "object": self.body_object})[:-1] + b',"choices":[')
        for choice in choices:
            for piece in json_pieces(choice):
                body += piece
            body += b","
        body[-1:] = b"]"
        for name, value in {"usage": usage.as_object(), **extra}.items():
            body += b"," + _encode(name) + b":"
            for piece in json_pieces(value):
                body += piece
        body += b"}"
        return body

    def _choice(self, choice: ChoiceResult, **content: Any) -> dict[str, Any]:
        logprobs = self._grown(choice.index).fields if choice.has_logprobs else None
        shown = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        self._collected.pop(choice.index, None)
        return {**shown, **choice.extra}


def json_text(text: str) -> bytes:
    encoded = _encode(text)
    return encoded if text.isascii() else one_line(encoded)


def one_line(encoded: bytes) -> bytes:
    """One line for every reader: str.splitlines, which some clients use, also splits at these three characters."""
    for character, escape in _SPLITTERS:
        encoded = encoded.replace(character.encode(), escape)
    return encoded
