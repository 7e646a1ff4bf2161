"""Receives a multipart upload into a part file, within limits of size, time, and form lines; never whole in memory.

aiohttp reads each line around the file separately, 2 us each, so a body of empty lines would occupy the event loop:
their number is limited. Threads write the data, one per key at a time.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.batches.storage.disk import ended
from gateway.batches.storage.file_store import FileStore, Part
from gateway.errors import BodyTooLarge, InvalidRequest, MissingParameter, RequestTimeout, UnsupportedMediaType
from gateway.http.media_type import check_encoding, media_type_of

CHUNK_BYTES = 2**18
MIN_BYTES_PER_SECOND = 32 * 2**10  # slower clients are disconnected
RESERVED_BYTES = 4 * 2**20  # reserved at a time for a body of unknown length
MAX_FIELD_BYTES = 1024
MAX_FIELDS = 16
MAX_FORM_BYTES = 64 * 2**10  # everything but the file: fields, headers, boundaries
MAX_FORM_LINES = 256  # 16 per field
MAX_HEADER_BYTES = 1024  # per field; a file name of 255 bytes may take three times as many when escaped
MULTIPART = "multipart/form-data"

_Result = TypeVar("_Result")


class Work(Protocol):
    """Runs blocking work in a thread, fairly among owners."""

    def __call__(self, work: Callable[[], _Result]) -> Coroutine[Any, Any, _Result]: ...


@dataclass(frozen=True, slots=True)
class Upload:
    part: Part  # the caller closes it
    filename: str
    fields: dict[str, str]


async def receive_upload(
    http: web.Request, files: FileStore, work: Work, *, owner_key_hash: str, max_bytes: int, timeout_seconds: float
) -> Upload:
    """Receive the body of POST /v1/files.

    Args:
        http: The request.
        files: Store of the part file.
        work: Runs blocking calls.
        owner_key_hash: Owner of the file.
        max_bytes: Limit of the file.
        timeout_seconds: Base limit of time; the received bytes extend it.

    Raises:
        GatewayError: If the form is invalid, too large, or too slow.
        OSError: If the disk fails.
    """
    if (media_type := media_type_of(http)) != MULTIPART:
        raise UnsupportedMediaType(f"Content-Type: expected {MULTIPART}, got {media_type[:100]}.")
    check_encoding(http)
    declared = http.content_length
    if declared is not None and declared > max_bytes + MAX_FORM_BYTES:
        raise _too_large(max_bytes)
    expected = RESERVED_BYTES if declared is None else declared  # reserve before receiving anything
    part = files.new_part(owner_key_hash)
    receiving = _Receiving(part, work, max_bytes, timeout_seconds)
    try:
        await ended(work(partial(part.open, min(expected, max_bytes))))
        await receiving.read(http)
        if receiving.filename is None:
            raise MissingParameter("Missing required parameter: file.", param="file")
    except BaseException as error:
        await ended(work(part.close))
        if isinstance(error, TimeoutError):
            raise RequestTimeout(f"The upload was slower than {MIN_BYTES_PER_SECOND} bytes per second.") from error
        if isinstance(error, (ValueError, AssertionError, web.RequestPayloadError, HttpProcessingError)):
            raise InvalidRequest("The multipart body is malformed.", param="file") from error
        raise
    return Upload(part, receiving.filename, receiving.fields)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"file: larger than {max_bytes} bytes.", param="file")


class _FewLines:
    """A multipart body. Only its first MAX_FORM_LINES are read as lines; the file's content is not."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._num_left = MAX_FORM_LINES
        self.read, self.at_eof, self.unread_data = content.read, content.at_eof, content.unread_data

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """Read a line; raise ValueError beyond the limit."""
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"a form of more than {MAX_FORM_LINES} lines")
        return await self._content.readline(max_line_length=max_line_length or MAX_HEADER_BYTES)


class _Receiving:
    def __init__(self, part: Part, work: Work, max_bytes: int, timeout_seconds: float) -> None:
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._part = part
        self._work = work
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds

    async def read(self, http: web.Request) -> None:
        async with asyncio.timeout(self._timeout_seconds) as limit:
            lines = cast(StreamReader, _FewLines(http.content))
            reader = MultipartReader(http.headers, lines, max_field_size=MAX_HEADER_BYTES)
            began_at = asyncio.get_running_loop().time()
            while (part := await reader.next()) is not None:
                if not isinstance(part, BodyPartReader) or len(self.fields) >= MAX_FIELDS:
                    raise InvalidRequest(f"The multipart body has nested parts, or more than {MAX_FIELDS} fields.")
                if part.name == "file" and self.filename is None:
                    name = (part.filename or "upload.jsonl")[:255]
                    self.filename = name.encode("utf-8", "replace").decode()  # replaces lone surrogates
                    await self._receive(part, limit, began_at)
                else:
                    await self._field(part)

    async def _field(self, part: BodyPartReader) -> None:
        name = part.name or ""
        text = await part.read_chunk(MAX_FIELD_BYTES)
        if not part.at_eof() and await part.read_chunk(MAX_FIELD_BYTES):  # a size below the boundary's is refused
            raise InvalidRequest(f"{name[:100]}: longer than {MAX_FIELD_BYTES} bytes.", param=name[:100] or None)
        if name in self.fields:
            raise InvalidRequest(f"{name[:100]}: given more than once.", param=name[:100] or None)
        self.fields[name] = text.decode()

    async def _receive(self, part: BodyPartReader, limit: asyncio.Timeout, began_at: float) -> None:
        while chunk := await part.read_chunk(CHUNK_BYTES):
            if self._part.num_bytes + len(chunk) > self._max_bytes:
                raise _too_large(self._max_bytes)
            await ended(self._work(partial(self._part.write, chunk, more=RESERVED_BYTES)))
            limit.reschedule(began_at + self._timeout_seconds + self._part.num_bytes / MIN_BYTES_PER_SECOND)
