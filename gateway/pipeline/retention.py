"""Which answers are kept, and which of their fields are stored. Pure except for random names.

    detach_seconds     in the body: how long the request outlives its client's connection
    Idempotency-Key    in the headers: a repeat gets the same answer; detach_seconds then has the gateway's default

A kept answer has event ids, can be resumed at any gateway, and can be read for ten minutes after its end.

Only the body fields needed to write the answer are stored; the rest is in the engine's request. Fields without effect
and values of unknown fields are left out, but their names are kept. The result is a valid body of its kind, compressed
if long.
"""

import hashlib
import json
import re
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import structs

from gateway.errors import InvalidRequest
from gateway.http.headers import NAME_HEADER
from gateway.http.json_body import JsonBody
from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.request import CompletionRequest
from shared.messages import GenerationRequest
from shared.new_requests import RetentionTerms

MIN_PACKED_BYTES = 1024  # a shorter one is a fifth of what the store needs for a request anyway
MAX_UNPACKED_BYTES = 16 * 2**20  # eight times the longest body that is read
MAX_TOLD_NAMES, MAX_TOLD_CHARS = 16, 64  # of unknown fields

MIN_GRACE_SECONDS = 15  # a gateway is not given up earlier than a worker is
PART = b"part"  # the record of every prompt's request but the first, which has the record of all
_NAME = re.compile(r"[\x21-\x7e]{1,255}")


def kept_body(kind: AnswerKind, body: JsonBody, ignored: Sequence[str]) -> bytes:
    """`body`: one that was read; `ignored`: the names in it that nobody knows."""
    kept: dict[str, Any] = {}
    for name, value in body.given.items():
        if name in kind.fields and value is not None:
            kept[name] = kind.stand_ins[name](value, body.given) if name in kind.stand_ins else value
    kept |= dict.fromkeys(name for name in listed_names(ignored) if name in body.given)  # not parts of fields
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()


_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*(\[\d+\])?", re.ASCII)


def listed_names(names: Sequence[str]) -> list[str]:
    """Return the names of ignored fields that may enter a header: clients choose them, so only plain ones, and few."""
    plain = [name for name in names if _PLAIN_NAME.fullmatch(name) and len(name) <= MAX_TOLD_CHARS]
    return plain[:MAX_TOLD_NAMES]


def packed(body: bytes) -> bytes:
    return zlib.compress(body)


def unpacked(data: bytes) -> bytes:
    """Decompress a kept body. Raises ValueError if it is invalid or too large."""
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(data, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError(f"cut short, or more than {MAX_UNPACKED_BYTES} bytes")
    return body


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a gateway needs to write the answer again, besides the first prompt's request."""

    kind: str
    created: int
    detach_seconds: float
    body: bytes = b""  # as kept_body() has it, or packed; without either, nobody can read the record
    packed: bytes = b""
    other_ids: list[str] = []  # of the second prompt's request and on
    others: list[GenerationRequest] = []  # those requests, in records of releases that stored them
    name: str = ""  # idempotency key; every holder of the answer extends it too


_decoder = msgspec.msgpack.Decoder(AnswerRecord)


@dataclass(frozen=True, slots=True)
class Retention:
    owner_key_hash: str
    detach_seconds: float
    name: str = ""  # a digest: whose name it is, and the name
    fingerprint: str = ""
    stale_id: str = ""


def retention_of(
    name: str | None, request: CompletionRequest, kind: str, body: JsonBody, owner_key_hash: str,
    *, default_detach_seconds: float, max_detach_seconds: float,
) -> Retention:  # fmt: skip
    """Return how an answer is kept. `name`: its client's own. Raises InvalidRequest."""
    detach_seconds = max_detach_seconds if request.background else request.fields.detach_seconds
    if detach_seconds is None:
        detach_seconds = min(default_detach_seconds, max_detach_seconds)
    if detach_seconds > max_detach_seconds:
        raise InvalidRequest(
            f"detach_seconds: expected at most {max_detach_seconds:g}; got {detach_seconds:g}.", param="detach_seconds"
        )
    if name is None:
        return Retention(owner_key_hash, detach_seconds)
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{NAME_HEADER}: expected 1 to 255 visible ASCII characters.", param=NAME_HEADER)
    canonical = json.dumps(body.given, sort_keys=True).encode()
    fingerprint = _digest(kind.encode(), canonical)
    return Retention(owner_key_hash, detach_seconds, name_digest(owner_key_hash, name), fingerprint)


def name_digest(owner_key_hash: str, name: str) -> str:
    """Return the digest of a client's idempotency key, as the store keeps it."""
    return _digest(owner_key_hash.encode(), name.encode())


def new_terms(
    retention: Retention,
    planned: Sequence[GenerationRequest],
    kind: AnswerKind,
    body: JsonBody,
    ignored: Sequence[str],
    created: int,
) -> list[RetentionTerms]:
    """One a planned request, for its ACCEPT. `ignored`: names of fields of `body` that nobody knows."""
    other_ids = [request.request_id for request in planned[1:]]
    kept = kept_body(kind, body, ignored)
    # Of several requests always: releases that look for `others` are to find nothing rather than a part.
    is_packed = bool(other_ids) or len(kept) >= MIN_PACKED_BYTES
    record = AnswerRecord(
        kind=kind.name,
        created=created,
        detach_seconds=retention.detach_seconds,
        body=b"" if is_packed else kept,
        packed=packed(kept) if is_packed else b"",
        other_ids=other_ids,
        name=retention.name,
    )
    first, *parts = attached_terms(
        msgspec.msgpack.encode(record), retention.owner_key_hash, retention.detach_seconds, len(planned), retention.name
    )
    return [replace(first, fingerprint=retention.fingerprint, stale_id=retention.stale_id), *parts]


def attached_terms(
    first_record: bytes, owner_key_hash: str, detach_seconds: float, num_requests: int, name: str
) -> list[RetentionTerms]:
    """One a request, of a new holder; the first has the name of all."""
    first = RetentionTerms(first_record, secrets.token_hex(8), owner_key_hash, grace_seconds(detach_seconds), name)
    return [first, *(replace(first, record=PART, name="") for _ in range(num_requests - 1))]


def decode_record(data: bytes) -> AnswerRecord | None:
    """Decode a record; None if it is not the first of a kept answer, or was written by a later release."""
    if not data or data == PART:
        return None
    try:
        record = _decoder.decode(data)
        return structs.replace(record, body=unpacked(record.packed)) if record.packed else record
    except ValueError:  # DecodeError and ValidationError are such
        return None


def grace_seconds(detach_seconds: float) -> int:
    return max(MIN_GRACE_SECONDS, round(detach_seconds))


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
