"""The input of a batch, read piece by piece: a file may be far larger than what should be in memory. Blocking.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

What is wrong with the form of a line is a problem, told with its number before anything is computed. What is wrong with
the body of its request is told as that line's result, by the same checks as over HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.batches.records import BatchProblem
from gateway.errors import GatewayError, InvalidJson, InvalidRequest
from gateway.requests.json_structure import MAX_DEPTH
from gateway.requests.request_body import MAX_BODY_BYTES, decode_body

MAX_LINES = 50_000  # OpenAI's
MAX_PROBLEMS = 100  # told; the rest would only be more of the same
CHUNK_LINES = 64

_MAX_LINE_BYTES = MAX_BODY_BYTES + 4096  # its names beside the body


class _LineFields(msgspec.Struct, kw_only=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # from 1, empty lines counted
    custom_id: str
    body: bytes


class LineReader:
    """Lines and problems in the order of the file, in chunks; an empty chunk is the end."""

    def __init__(self, path: Path, endpoint: str) -> None:
        self._lines = self._read(path, endpoint)

    def next_chunk(self) -> list[BatchLine | BatchProblem]:
        return [line for _, line in zip(range(CHUNK_LINES), self._lines, strict=False)]

    def _read(self, path: Path, endpoint: str) -> Iterator[BatchLine | BatchProblem]:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(text) > _MAX_LINE_BYTES:
                    message = f"The line is larger than {_MAX_LINE_BYTES} bytes."
                    yield BatchProblem(code="line_too_large", message=message, line=number)
                    return  # where the next one begins is not looked for
                if not text.isspace():
                    yield _line_or_problem(text, number, endpoint)


class LineChecks:
    """What only all lines together tell."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.problems: list[BatchProblem] = []
        self._custom_ids: set[str] = set()

    @property
    def are_over(self) -> bool:
        """More would change nothing."""
        return len(self.problems) >= MAX_PROBLEMS or self.num_lines > MAX_LINES

    def take(self, line: BatchLine | BatchProblem) -> None:
        self.num_lines += 1
        if isinstance(line, BatchProblem):
            self.problems.append(line)
        elif line.custom_id in self._custom_ids:
            message = f"custom_id {line.custom_id[:100]!r} is there twice."
            self._add("duplicate_custom_id", message, "custom_id", line.number)
        elif self.num_lines > MAX_LINES:
            self._add("too_many_requests", f"A batch has at most {MAX_LINES} requests.", None, line.number)
        else:
            self._custom_ids.add(line.custom_id)

    def end(self) -> None:
        if not self.num_lines:
            self._add("empty_file", "The input file holds no request.", "input_file_id", None)

    def _add(self, code: str, message: str, param: str | None, line: int | None) -> None:
        self.problems.append(BatchProblem(code=code, message=message, param=param, line=line))


def _line_or_problem(text: bytes, number: int, endpoint: str) -> BatchLine | BatchProblem:
    try:
        fields, _ = decode_body(text, _LineFields, max_depth=MAX_DEPTH + 1)  # its own object, and the body's
        body = bytes(fields.body).strip()
        if fields.url != endpoint:
            raise InvalidRequest(f"url: expected {endpoint}, as the batch has; got {fields.url[:100]!r}.", param="url")
        if not body.startswith(b"{"):
            raise InvalidRequest("body: expected a JSON object.", param="body")
    except InvalidJson as error:
        return BatchProblem(code="invalid_json_line", message=error.message, line=number)
    except GatewayError as error:
        return BatchProblem(code=error.code, message=error.message, param=error.param, line=number)
    return BatchLine(number, fields.custom_id, body)
