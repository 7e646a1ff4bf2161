"""A deterministic engine that stores answers in memory, for recording the golden files.

It answers token by token, with logprobs if the request asks for them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gateway.store.request_archive import StoredRequest
from shared.messages import (
    EncodedLogprobs,
    ErrorCode,
    ErrorEvent,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    StreamEvent,
    TokenEvent,
    TokenLogprobs,
    encoded_logprobs,
)
from shared.new_requests import RetentionTerms, Share
from tests.gateway.fake_inference import FakeInferenceClient, FakeStream, finish


def says_text(encode: Callable[[str], list[int]], text: str) -> Callable[[GenerationRequest], Iterable[StreamEvent]]:
    """Return a script in which each choice says `text`, one token per event, and ends with `stop`."""

    def script(request: GenerationRequest) -> Iterable[StreamEvent]:
        token_ids, n = encode(text), request.sampling.n
        if request.sampling.prompt_logprobs is not None:
            scores = [_scored(token_id) for token_id in request.prompt_token_ids[1:]]
            yield TokenEvent(request.request_id, 0, [], prompt_logprobs=PromptLogprobs(1, scores))
        for index, token_id in enumerate(token_ids):
            logprobs = None if request.sampling.logprobs is None else [_scored(token_id)]
            for choice in range(n):
                yield TokenEvent(request.request_id, index, [token_id], choice, logprobs=logprobs)
        if n > 1:
            for choice in range(n):
                yield TokenEvent(request.request_id, len(token_ids), [], choice, FinishReason.STOP)
        yield finish(request, n * len(token_ids))

    return script


def fails(code: ErrorCode) -> Callable[[GenerationRequest], Iterable[StreamEvent]]:
    """Return a script that sends one token and then the engine's error."""

    def script(request: GenerationRequest) -> Iterable[StreamEvent]:
        yield TokenEvent(request.request_id, 0, [70])
        yield ErrorEvent(request.request_id, code, "broken")

    return script


def _scored(token_id: int) -> EncodedLogprobs:
    """Make the logprob recognizable by its token, and exact in any float."""
    other = token_id + 1
    return encoded_logprobs(TokenLogprobs(-token_id / 1024, (token_id, other), (-token_id / 1024, -other / 1024)))


class KeptStream(FakeStream):
    """A stream that remembers whether it had ended before a reader attached."""

    had_ended = False


class KeepingInferenceClient(FakeInferenceClient):
    """Store requests that have retention terms by id and by Idempotency-Key, as the store does."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, StoredRequest] = {}
        self._events: dict[str, list[StreamEvent]] = {}
        self._names: dict[str, tuple[str, str]] = {}

    async def submit_all(
        self,
        requests: Sequence[GenerationRequest],
        terms_of_each: Sequence[RetentionTerms] = (),
        share: Share | None = None,
    ) -> list[FakeStream]:
        for request, terms in zip(requests, terms_of_each, strict=False):
            self._keep(request, terms)
        return await super().submit_all(requests, terms_of_each, share)

    def _keep(self, request: GenerationRequest, terms: RetentionTerms) -> None:
        assert self.script is not None, "a stored answer needs a script"
        events = list(self.script(request))
        num_tokens = sum(len(event.token_ids) for event in events if isinstance(event, TokenEvent))
        end = events[-1]
        assert not isinstance(end, TokenEvent), "every script ends"
        self._events[request.request_id] = events
        self._kept[request.request_id] = StoredRequest(
            request, "done", terms.owner_key_hash, terms.record, num_tokens, end
        )
        if terms.name:
            self._names[terms.name] = request.request_id, terms.fingerprint

    async def attach_all(
        self, requests: Sequence[GenerationRequest], terms_of_each: Sequence[RetentionTerms]
    ) -> list[FakeStream]:
        streams = []
        for request in requests:
            stream = KeptStream(request)
            stream.had_ended = True
            for event in self._events[request.request_id]:
                stream.send(event)
            streams.append(stream)
        return [*streams]

    async def stored(self, request_ids: Iterable[str]) -> list[StoredRequest | None]:  # type: ignore[override]
        return [self._kept.get(request_id) for request_id in request_ids]

    async def keeps(self, request_id: str) -> bool:
        return request_id in self._kept

    async def named(self, digest: str) -> tuple[str, str] | None:  # type: ignore[override]
        return self._names.get(digest)

    async def decode(self, key: object, num_bytes: int, decode: Callable[[], Any]) -> Any:
        return decode()

    async def cancel(self, request: GenerationRequest) -> None:
        """Leave the stored answer unchanged, because it has ended."""

    async def erase(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self._kept[request_id]
