"""A file of batch results in OpenAI's format, one JSON line each, appended in any order. Blocking.

    {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

An interrupted writer leaves at most one partial line at the end, which the next writer removes.
"""

import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec


class ResultFileError(ValueError):
    """The file has other content; the message names the line."""


class _Failed(msgspec.Struct):
    code: str


class _Named(msgspec.Struct):
    custom_id: str
    error: _Failed | None = None


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
    """A result file, open for appending."""

    def __init__(self, path: Path, *, known_bytes: int = 0, repeated: Collection[str] = ()) -> None:
        """Open a file and read the `custom_ids` of its results after `known_bytes`.

        Args:
            path: The file, which is created if it does not exist.
            known_bytes: Size of complete results at the beginning that the caller already knows.
            repeated: Codes of failures whose requests are sent again: these results are removed.

        Raises:
            ResultFileError: If a line is not a result.
        """
        path.touch()
        if repeated:
            _remove_failures(path, repeated)
        self.custom_ids: set[str] = set()
        self.num_bytes = known_bytes
        for result, text in _whole_results(path, known_bytes):
            self.custom_ids.add(result.custom_id)
            self.num_bytes += len(text)
        os.truncate(path, self.num_bytes)
        self._file: BinaryIO = path.open("ab")

    def add(self, custom_id: str, request_id: str, status: int, body: bytes | bytearray) -> None:
        """Append a result. `body` is JSON without line breaks."""
        response = _Response(status, request_id, msgspec.Raw(body))
        self._append(_Result(_new_id(), custom_id, response, None))

    def add_failure(self, custom_id: str, code: str, message: str) -> None:
        self._append(_Result(_new_id(), custom_id, None, _Error(code, message)))

    def close(self) -> None:
        try:
            self._file.flush()  # raises if the disk is full
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
    """Return a random id, because a refused line has no request id."""
    return f"batch_req_{secrets.token_hex(16)}"


def _remove_failures(path: Path, codes: Collection[str]) -> None:
    """Replace the file by one without these failures; a crash leaves the old or the new one."""
    results = list(_whole_results(path, 0))
    kept = [text for result, text in results if result.error is None or result.error.code not in codes]
    if len(kept) < len(results):
        replacement = path.with_name(path.name + ".new")
        replacement.write_bytes(b"".join(kept))
        replacement.replace(path)


def _whole_results(path: Path, offset: int) -> Iterator[tuple[_Named, bytes]]:
    with path.open("rb") as written:
        written.seek(offset)
        for number, text in enumerate(written, start=1):
            if not text.endswith(b"\n"):
                return
            try:
                yield _decoder.decode(text), text
            except msgspec.DecodeError as error:
                raise ResultFileError(f"{path}, line {number}: not a batch result; choose another file") from error
