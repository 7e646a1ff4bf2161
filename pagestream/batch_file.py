"""Files of `pagestream run-batch`, in OpenAI's batch format: requests in, one result a line out. No network here.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

Results are appended as they come, in any order. A run that was cut off leaves at most half a line at the end, which the
next one takes away; what has a result is not asked again.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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


class Results:
    """The file of results, open for more."""

    def __init__(self, path: Path) -> None:
        """Raises BatchFileError for a file that holds something else."""
        path.touch()
        self.custom_ids: set[str] = set()
        num_whole_bytes = 0
        with path.open("rb") as written:
            for number, text in enumerate(written, start=1):
                if text.endswith(b"\n"):
                    self.custom_ids.add(_custom_id_of_result(text, f"{path}, line {number}"))
                    num_whole_bytes += len(text)
        os.truncate(path, num_whole_bytes)
        self._file: BinaryIO = path.open("ab")

    def add(self, custom_id: str, request_id: str, status: int, body: Any) -> None:
        response = {"status_code": status, "request_id": request_id, "body": body}
        result = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}
        self._append(custom_id, result)

    def add_failure(self, custom_id: str, code: str, message: str) -> None:
        error = {"code": code, "message": message}
        self._append(custom_id, {"id": "batch_req_", "custom_id": custom_id, "response": None, "error": error})

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def _append(self, custom_id: str, result: dict[str, Any]) -> None:
        self._file.write(json.dumps(result).encode() + b"\n")
        self._file.flush()
        self.custom_ids.add(custom_id)


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


def _custom_id_of_result(text: bytes, where: str) -> str:
    custom_id = _object(text, where).get("custom_id")
    if not isinstance(custom_id, str):
        raise BatchFileError(f"{where}: is no result of a batch; name another file")
    return custom_id


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise BatchFileError(f"{where}: {error}") from error
    if not isinstance(fields, dict):
        raise BatchFileError(f"{where}: expected a JSON object")
    return fields
