"""Results of a batch, one JSON line each in OpenAI's form, appended as they come, in any order. Blocking.

    {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

A writer that was cut off leaves at most half a line at the end, which the next one takes away.

It is the end of a line's way back, in batches of the gateway and in `pagestream run-batch`. It does not know what a
result says.
"""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec


class ResultFileError(ValueError):
    """A file that holds something else; the message names the line."""


class _Named(msgspec.Struct):
    custom_id: str


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


_decoder = msgspec.json.Decoder(_Named)
_encoder = msgspec.json.Encoder()


class ResultFile:
    """Open for more."""

    def __init__(self, path: Path, *, known_bytes: int = 0) -> None:
        """`known_bytes`: so many at the beginning are whole results that the caller knows of; `custom_ids` are those
        behind them. Raises ResultFileError."""
        path.touch()
        self.custom_ids: set[str] = set()
        self.num_bytes = known_bytes
        for custom_id, num_bytes in _whole_results(path, known_bytes):
            self.custom_ids.add(custom_id)
            self.num_bytes += num_bytes
        os.truncate(path, self.num_bytes)
        self._file: BinaryIO = path.open("ab")

    def add(self, custom_id: str, request_id: str, status: int, body: bytes | bytearray) -> None:
        """`body`: JSON without line breaks."""
        response = _Response(status, request_id, msgspec.Raw(body))
        self._append(_Result(_new_id(), custom_id, response, None))

    def add_failure(self, custom_id: str, code: str, message: str) -> None:
        self._append(_Result(_new_id(), custom_id, None, _Error(code, message)))

    def close(self) -> None:
        try:
            self._file.flush()  # what a full disk has refused so far
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _append(self, result: _Result) -> None:
        text = _encoder.encode(result) + b"\n"
        self._file.write(text)
        self._file.flush()
        self.num_bytes += len(text)
        self.custom_ids.add(result.custom_id)


def _new_id() -> str:
    """Draw the id of a result, as a line that was refused has no request whose id it could have."""
    return f"batch_req_{secrets.token_hex(16)}"


def _whole_results(path: Path, offset: int) -> Iterator[tuple[str, int]]:
    with path.open("rb") as written:
        written.seek(offset)
        for number, text in enumerate(written, start=1):
            if not text.endswith(b"\n"):
                return
            try:
                yield _decoder.decode(text).custom_id, len(text)
            except msgspec.DecodeError as error:
                raise ResultFileError(f"{path}, line {number}: is no result of a batch; name another file") from error
