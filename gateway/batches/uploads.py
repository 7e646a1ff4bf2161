"""A multipart upload, received into a part file: never in memory as a whole, and within limits of size and time.

A form has so many lines around its file: aiohttp reads each by itself, 2 us, and a body of nothing but empty lines
would be read on the event loop without a pause. What is written is written by threads that keys have in turn, one each.

Beside the walks: POST /v1/files reads its body by it. It knows no line of what it receives.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.batches.disk import ended
from gateway.batches.file_store import FileStore, Part
from gateway.errors import BodyTooLarge, InvalidRequest, MissingParameter, RequestTimeout, UnsupportedMediaType
from gateway.http.media_type import check_encoding, media_type_of

CHUNK_BYTES = 2**18
MIN_BYTES_PER_SECOND = 32 * 2**10  # slower clients hold a connection for nothing
RESERVED_BYTES = 4 * 2**20  # room that is taken at one time for a body of unknown length
MAX_FIELD_BYTES = 1024
MAX_FIELDS = 16
MAX_FORM_BYTES = 64 * 2**10  # of what is around the file: fields, their headers, boundaries
MAX_FORM_LINES = 256  # 16 for each field
MAX_HEADER_BYTES = 1024  # of a field: a file's name has 255, which may be written in three times as many
MULTIPART = "multipart/form-data"

_Result = TypeVar("_Result")


class Work(Protocol):
    """Does what blocks in a thread, in its owner's turn."""

    def __call__(self, work: Callable[[], _Result]) -> Coroutine[Any, Any, _Result]: ...


@dataclass(frozen=True, slots=True)
class Upload:
    part: Part  # the receiver's to close
    filename: str
    fields: dict[str, str]


async def receive_upload(
    http: web.Request, files: FileStore, work: Work, *, owner_key_hash: str, max_bytes: int, timeout_seconds: float
) -> Upload:
    """`timeout_seconds`: for a small one. Raises GatewayError, and OSError."""
    if (media_type := media_type_of(http)) != MULTIPART:
        raise UnsupportedMediaType(f"Content-Type: expected {MULTIPART}, got {media_type[:100]}.")
    check_encoding(http)
    declared = http.content_length
    if declared is not None and declared > max_bytes + MAX_FORM_BYTES:
        raise _too_large(max_bytes)
    expected = RESERVED_BYTES if declared is None else declared  # room is taken before anything is received
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
            raise RequestTimeout("The upload came too slowly.") from error
        if isinstance(error, (ValueError, AssertionError, web.RequestPayloadError, HttpProcessingError)):
            raise InvalidRequest("The multipart body cannot be read.", param="file") from error
        raise
    return Upload(part, receiving.filename, receiving.fields)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"file: larger than {max_bytes} bytes.", param="file")


class _FewLines:
    """A body of which so many lines are read as such; a file's content is not read in lines."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._num_left = MAX_FORM_LINES
        self.read, self.at_eof, self.unread_data = content.read, content.at_eof, content.unread_data

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """Raises ValueError."""
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
                    raise InvalidRequest("The multipart body has parts within parts, or too many.")
                if part.name == "file" and self.filename is None:
                    name = (part.filename or "upload.jsonl")[:255]
                    self.filename = name.encode("utf-8", "replace").decode()  # bytes of no text come as lone surrogates
                    await self._receive(part, limit, began_at)
                else:
                    await self._field(part)

    async def _field(self, part: BodyPartReader) -> None:
        name = part.name or ""
        text = await part.read_chunk(MAX_FIELD_BYTES)
        if not part.at_eof() and await part.read_chunk(MAX_FIELD_BYTES):  # it refuses sizes below the boundary's
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
