"""The input of a batch, read in chunks because a file may exceed memory. Blocking.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A malformed line is a problem, reported with its number before any line runs. An invalid request body becomes the result
of its line, from the same checks as over HTTP.
"""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.batches.storage.records import BatchProblem
from gateway.errors import GatewayError, InvalidJson, InvalidRequest
from gateway.http.json_body import MAX_BODY_BYTES, decode_envelope

MAX_LINES = 50_000  # OpenAI's limit
MAX_PROBLEMS = 100  # reported per batch
CHUNK_LINES = 64
CHUNK_BYTES = 2**20  # or one line; kept small because many batches run at once

_MAX_LINE_BYTES = MAX_BODY_BYTES + 4096  # the body and the fields around it


_RESULT_BYTES = 400  # of a result without its body: ids, field names, the longest own error message


def failure_bytes(custom_id: str) -> int:
    """Return the maximum size of a line's result if it is an error of the batch."""
    return len(msgspec.json.encode(custom_id)) + _RESULT_BYTES


class _LineFields(msgspec.Struct, kw_only=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # from 1, including empty lines
    offset: int  # in bytes, in the file
    custom_id: str
    body: bytes


class LineReader:
    """Reader of lines and problems in file order, in bounded chunks, which may be empty before the end."""

    def __init__(self, path: Path, endpoint: str, *, number: int = 1, offset: int = 0) -> None:
        """Create a reader; `number` is the line that starts at byte `offset`."""
        self.is_over = False
        self._path = path
        self._endpoint = endpoint
        self._number = number
        self._offset = offset

    def next_chunk(self) -> list[BatchLine | BatchProblem]:
        begin, chunk = self._offset, list[BatchLine | BatchProblem]()
        with self._path.open("rb") as file:  # a waiting batch keeps no file open
            file.seek(begin)
            while not self.is_over and len(chunk) < CHUNK_LINES and self._offset - begin < CHUNK_BYTES:
                text = file.readline(_MAX_LINE_BYTES + 1)
                chunk += self._taken(text)
        return chunk

    def _taken(self, text: bytes) -> list[BatchLine | BatchProblem]:
        number, offset = self._number, self._offset
        self._number += 1
        self._offset += len(text)
        self.is_over = not text
        if len(text) > _MAX_LINE_BYTES:
            return [self._last("line_too_large", f"The line is larger than {_MAX_LINE_BYTES} bytes.", number)]
        if number > 2 * MAX_LINES:
            message = f"A file has at most {2 * MAX_LINES} lines, including empty ones."
            return [self._last("too_many_lines", message, number)]
        return [_line_or_problem(text, number, offset, self._endpoint)] if text and not text.isspace() else []

    def _last(self, code: str, message: str, number: int) -> BatchProblem:
        """Return a problem that stops reading."""
        self.is_over = True
        return BatchProblem(code=code, message=message, line=number)


class LineChecks:
    """Checks across all lines."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.failure_bytes = 0  # size of one error result per line
        self.problems: list[BatchProblem] = []
        self._custom_ids: set[bytes] = set()  # digests, because 50,000 ids may have 512 characters each

    @property
    def are_over(self) -> bool:
        """Whether further lines cannot change the outcome."""
        return len(self.problems) >= MAX_PROBLEMS or self.num_lines > MAX_LINES

    def take(self, line: BatchLine | BatchProblem) -> None:
        self.num_lines += 1
        if isinstance(line, BatchProblem):
            self.problems.append(line)
        elif (digest := blake2b(line.custom_id.encode(), digest_size=16).digest()) in self._custom_ids:
            message = f"custom_id {line.custom_id[:100]!r} is used twice."
            self._add("duplicate_custom_id", message, "custom_id", line.number)
        elif self.num_lines > MAX_LINES:
            self._add("too_many_requests", f"A batch has at most {MAX_LINES} requests.", None, line.number)
        else:
            self._custom_ids.add(digest)
            self.failure_bytes += failure_bytes(line.custom_id)

    def end(self) -> None:
        if not self.num_lines:
            self._add("empty_file", "The input file contains no requests.", "input_file_id", None)

    def _add(self, code: str, message: str, param: str | None, line: int | None) -> None:
        self.problems.append(BatchProblem(code=code, message=message, param=param, line=line))


def _line_or_problem(text: bytes, number: int, offset: int, endpoint: str) -> BatchLine | BatchProblem:
    try:
        fields = decode_envelope(text, _LineFields, content="body")
        body = bytes(fields.body).strip()
        if fields.url != endpoint:
            raise InvalidRequest(
                f"url: expected {endpoint}, the batch's endpoint; got {fields.url[:100]!r}.", param="url"
            )
        if not body.startswith(b"{"):
            raise InvalidRequest("body: expected a JSON object.", param="body")
    except InvalidJson as error:
        return BatchProblem(code="invalid_json_line", message=error.message, line=number)
    except GatewayError as error:
        return BatchProblem(code=error.code, message=error.message, param=error.param, line=number)
    return BatchLine(number, offset, fields.custom_id, body)
