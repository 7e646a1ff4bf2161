"""The input of `pagestream run-batch`, in OpenAI's batch format. Pure but for reading the file.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

It serves run_batch.py. It knows no server, and not what a body means.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")


class BatchFileError(ValueError):
    """A file that is no batch; the message names the line."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    custom_id: str
    url: str
    body: bytes
    key: str  # the same in every run over the same line: the server computes it once


def read_lines(path: Path) -> list[BatchLine]:
    """Raises BatchFileError: what is wrong is said before anything is computed."""
    lines: dict[str, BatchLine] = {}
    for number, text in enumerate(_texts(path), start=1):
        line = _line(text, f"{path}, line {number}")
        if line.custom_id in lines:
            raise BatchFileError(f"{path}, line {number}: custom_id {line.custom_id!r} is there twice")
        lines[line.custom_id] = line
    if not lines:
        raise BatchFileError(f"{path}: holds no request")
    return list(lines.values())


def _texts(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from (text for text in file if text.strip())
    except OSError as error:
        raise BatchFileError(f"{path}: {error.strerror}") from error


def _line(text: bytes, where: str) -> BatchLine:
    fields = _object(text, where)
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchFileError(f"{where}: custom_id: expected a text")
    if fields.get("method", "POST") != "POST" or url not in URLS:
        raise BatchFileError(f"{where}: url: expected a POST of {', '.join(URLS)}; got {url!r}")
    if not isinstance(body, dict) or body.get("stream"):
        raise BatchFileError(f"{where}: body: expected the JSON object of a request without stream")
    encoded = json.dumps(body).encode()
    digest = hashlib.blake2b(b"\0".join((custom_id.encode(), url.encode(), encoded)), digest_size=16)
    return BatchLine(custom_id, url, encoded, f"batch-{digest.hexdigest()}")


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise BatchFileError(f"{where}: {error}") from error
    if not isinstance(fields, dict):
        raise BatchFileError(f"{where}: expected a JSON object")
    return fields
