"""Kept answers in the store: found by id or by the client's own name, and read again from their first token.

For any other key than the one that made the request, the answer does not exist.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from gateway.errors import GenerationFailed, IdempotencyKeyReused, RequestNotFound
from gateway.fleet import unavailable
from gateway.http.json_body import JsonBody
from gateway.model_service import ModelService
from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.retention import AnswerRecord, Retention, attached_terms, decode_record
from gateway.store.inbox import Inbox
from gateway.store.request_archive import StoredRequest
from gateway.store.store_calls import RequestGone, StoreUnavailable
from shared.messages import ErrorCode, ErrorEvent, FinishEvent, FinishReason, FormatError, GenerationRequest
from shared.new_requests import RetentionTerms

Kinds: TypeAlias = Mapping[str, AnswerKind]  # by name
_RECORD_GROWS = 16  # when it is unpacked, or more, but then it is quickly read
_ID = re.compile(r"(?:[a-z]+[-_])?([0-9a-f]{32})")  # as in the answer, with or without its prefix


class AnswerChanged(Exception):
    """A client's name now refers to another answer: look it up again."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    service: ModelService  # its model
    answer_id: str  # the id of its first request
    record: AnswerRecord
    encoded_record: bytes
    kind: AnswerKind
    body: JsonBody  # what was stored of it
    completion: CompletionRequest  # the body, parsed again
    parts: Sequence[StoredRequest]  # one a prompt
    is_repeat: bool = False  # found by idempotency key: sent again if it is valid, else generated again

    @property
    def state(self) -> str:
        """Return `queued`, `running`, `finished`, `failed`, or `cancelled`."""
        ends = [part.terminal for part in self.parts]
        if any(isinstance(end, ErrorEvent) for end in ends):
            return "failed"
        if any(isinstance(end, FinishEvent) and end.reason is FinishReason.CANCELLED for end in ends):
            return "cancelled"
        if all(ends):
            return "finished"
        return "queued" if all(part.state == "queued" and not part.num_tokens for part in self.parts) else "running"

    @property
    def is_open(self) -> bool:
        """Whether it is queued or running."""
        return self.state in ("queued", "running")

    @property
    def has_result(self) -> bool:
        """An answer, or the error that it ended with."""
        return self.state in ("finished", "failed")

    @property
    def ended_at(self) -> int:
        """Unix seconds; 0 while it goes on."""
        ends = [part.terminal.ended_at if isinstance(part.terminal, FinishEvent) else 0 for part in self.parts]
        return max(ends) if all(ends) else 0

    @property
    def stands(self) -> bool:
        """Return whether a retry with the same Idempotency-Key gets this stored answer.

        It does not if the answer was a retryable error, or ended because its client had left.
        """
        return not any(_was_given_up(part) for part in self.parts)

    @property
    def requests(self) -> list[GenerationRequest]:
        return [part.request for part in self.parts]

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompts and those that the engine has made so far."""
        return sum(len(part.request.prompt_token_ids) + part.num_tokens for part in self.parts)

    def terms_of_each(self) -> list[RetentionTerms]:
        """Return the retention terms of a new holder, one per request."""
        return attached_terms(
            self.encoded_record,
            self.parts[0].owner_key_hash,
            self.record.detach_seconds,
            len(self.parts),
            self.record.name,
        )

    async def attach(self) -> list[Inbox]:
        """Return its streams, each read from the first token.

        Raises:
            Unavailable: If the store does not answer.
            RequestNotFound: If the answer is gone by now.
            AnswerChanged: Instead of RequestNotFound, for a repeat.
        """
        try:
            with _store_errors_raised():
                return await self.service.client.submission.attach_all(self.requests, self.terms_of_each())
        except RequestGone as error:
            raise (AnswerChanged() if self.is_repeat else _not_found()) from error

    def check_unchanged(self, streams: Sequence[Inbox]) -> None:
        """Raise AnswerChanged if a part of a repeated answer has ended since it was found: it may have been dropped."""
        parts = zip(self.parts, streams, strict=True)
        if self.is_repeat and any(part.terminal is None and stream.had_ended for part, stream in parts):
            raise AnswerChanged


async def find_answer(
    services: Iterable[ModelService], kinds: Kinds, answer_id: str, owner_key_hash: str
) -> KeptAnswer:
    """Return the answer from the first of `services` that has it, because an id does not name a model.

    Raises:
        RequestNotFound: If none has it for this key.
        Unavailable: If the store does not answer, or has lost its data and gets running requests again.
        GenerationFailed: If the stored answer is unreadable.
    """
    searched = list(services)
    try:
        return await _find(searched, kinds, answer_id, owner_key_hash)
    except RequestNotFound:
        with _store_errors_raised():
            if any([await service.client.history.is_young() for service in searched]):
                raise unavailable("store_recovering") from None
        raise


async def _find(services: Iterable[ModelService], kinds: Kinds, answer_id: str, owner_key_hash: str) -> KeptAnswer:
    if matched := _ID.fullmatch(answer_id):
        for service in services:
            (first,) = await _stored(service, [matched[1]])
            if first is not None:
                return await _answer_of(service, kinds, first, owner_key_hash)
    raise _not_found()


async def _answer_of(service: ModelService, kinds: Kinds, first: StoredRequest, owner_key_hash: str) -> KeptAnswer:
    if first.owner_key_hash != owner_key_hash:
        raise _not_found()
    num_bytes = len(first.record) * _RECORD_GROWS
    read = await service.client.archive.decode(owner_key_hash, num_bytes, partial(_read, first.record, kinds))
    if read is None:
        raise _not_found()
    record, kind, body, completion = read
    parts = [first]
    other_ids = record.other_ids or [other.request_id for other in record.others]
    for other in await _stored(service, other_ids) if other_ids else []:
        if other is None:  # they are accepted together, and kept until the last has ended: the store lost it
            raise _not_found()
        parts.append(other)
    return KeptAnswer(service, first.request.request_id, record, first.record, kind, body, completion, parts)


def _read(record: bytes, kinds: Kinds) -> tuple[AnswerRecord, AnswerKind, JsonBody, CompletionRequest] | None:
    """Decode a record and its body. Return None if their kind is unknown."""
    known = decode_record(record)
    if known is None or known.kind not in kinds:
        return None
    kind = kinds[known.kind]
    body = kind.decode(known.body)
    return known, kind, body, kind.parse(body)


async def find_named(
    service: ModelService, kinds: Kinds, retention: Retention, owner_key_hash: str
) -> tuple[KeptAnswer | None, str]:
    """Return the answer of the client's idempotency key; or None and the id of an answer that is gone or invalid.

    Raises:
        IdempotencyKeyReused: If the key belongs to another body.
        GatewayError: As find_answer().
    """
    with _store_errors_raised():
        named = await service.client.archive.named(retention.name)
    if named is None:
        return None, ""
    answer_id, fingerprint = named
    try:
        kept = await _find([service], kinds, answer_id, owner_key_hash)
    except RequestNotFound:
        return None, answer_id
    if not kept.stands:
        return None, answer_id
    if fingerprint != retention.fingerprint:
        raise IdempotencyKeyReused(
            "Idempotency-Key: already used with a different request body; use a new key.", param="Idempotency-Key"
        )
    return replace(kept, is_repeat=True), answer_id


def _was_given_up(part: StoredRequest) -> bool:
    end = part.terminal
    if isinstance(end, ErrorEvent):
        return end.code is ErrorCode.QUEUE_TIMEOUT
    return isinstance(end, FinishEvent) and end.reason is FinishReason.CANCELLED and not part.was_cancelled


async def _stored(service: ModelService, request_ids: list[str]) -> list[StoredRequest | None]:
    try:
        with _store_errors_raised():
            return await service.client.archive.stored(request_ids)
    except FormatError as error:
        raise GenerationFailed("The stored answer is unreadable.") from error


def _not_found() -> RequestNotFound:
    return RequestNotFound(
        "This API key has no such request, or it was not kept; set detach_seconds to keep a request.", param="id"
    )


@contextmanager
def _store_errors_raised() -> Iterator[None]:
    """Convert StoreUnavailable to Unavailable."""
    try:
        yield
    except StoreUnavailable as error:
        raise unavailable("store_unavailable", "The request store does not answer.") from error
