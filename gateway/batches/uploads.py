"""A multipart upload, received into a part file: never in memory as a whole, and within limits of size and time."""

import asyncio
from dataclasses import dataclass

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.batches.file_store import FileStore, Part
from gateway.errors import BodyTooLarge, InvalidRequest, MissingParameter, RequestTimeout, UnsupportedMediaType

CHUNK_BYTES = 2**18
MIN_BYTES_PER_SECOND = 32 * 2**10  # slower clients hold a connection for nothing
MAX_FIELD_BYTES = 1024
MAX_FIELDS = 16
MULTIPART = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Upload:
    part: Part  # the receiver's to close
    filename: str
    fields: dict[str, str]


async def receive_upload(
    http: web.Request, files: FileStore, *, max_bytes: int, used_bytes: int, max_used_bytes: int, timeout_seconds: float
) -> Upload:
    """`timeout_seconds`: for a small one. Raises GatewayError."""
    if http.content_type != MULTIPART:
        raise UnsupportedMediaType(f"Content-Type: expected {MULTIPART}, got {http.content_type[:100]}.")
    part = await asyncio.to_thread(files.begin)
    receiving = _Receiving(part, max_bytes, used_bytes, max_used_bytes, timeout_seconds)
    try:
        await receiving.read(http)
    except BaseException as error:
        await asyncio.to_thread(part.close)
        if isinstance(error, TimeoutError):
            raise RequestTimeout("The upload came too slowly.") from error
        if isinstance(error, (ValueError, AssertionError, web.RequestPayloadError, HttpProcessingError)):
            raise InvalidRequest("The multipart body cannot be read.", param="file") from error
        raise
    if receiving.filename is None:
        await asyncio.to_thread(part.close)
        raise MissingParameter("Missing required parameter: file.", param="file")
    return Upload(part, receiving.filename, receiving.fields)


class _Receiving:
    def __init__(
        self, part: Part, max_bytes: int, used_bytes: int, max_used_bytes: int, timeout_seconds: float
    ) -> None:
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._part = part
        self._max_bytes = max_bytes
        self._used_bytes = used_bytes
        self._max_used_bytes = max_used_bytes
        self._timeout_seconds = timeout_seconds

    async def read(self, http: web.Request) -> None:
        async with asyncio.timeout(self._timeout_seconds) as limit:
            reader = await http.multipart()
            began_at = asyncio.get_running_loop().time()
            while (part := await reader.next()) is not None:
                if not isinstance(part, BodyPartReader) or len(self.fields) >= MAX_FIELDS:
                    raise InvalidRequest("The multipart body has parts within parts, or too many.")
                if part.name == "file" and self.filename is None:
                    self.filename = (part.filename or "upload.jsonl")[:255]
                    await self._receive(part, limit, began_at)
                else:
                    await self._field(part)

    async def _field(self, part: BodyPartReader) -> None:
        name = part.name or ""
        text = await part.read_chunk(MAX_FIELD_BYTES)
        if not part.at_eof() and await part.read_chunk(MAX_FIELD_BYTES):  # it refuses sizes below the boundary's
            raise InvalidRequest(f"{name[:100]}: longer than {MAX_FIELD_BYTES} bytes.", param=name[:100] or None)
        self.fields[name] = text.decode()

    async def _receive(self, part: BodyPartReader, limit: asyncio.Timeout, began_at: float) -> None:
        while chunk := await part.read_chunk(CHUNK_BYTES):
            self._check_room(len(chunk))
            await asyncio.to_thread(self._part.write, chunk)
            limit.reschedule(began_at + self._timeout_seconds + self._part.num_bytes / MIN_BYTES_PER_SECOND)

    def _check_room(self, num_bytes: int) -> None:
        if self._part.num_bytes + num_bytes > self._max_bytes:
            raise BodyTooLarge(f"file: larger than {self._max_bytes} bytes.", param="file")
        if self._used_bytes + self._part.num_bytes + num_bytes > self._max_used_bytes:
            raise BodyTooLarge("file: there is no room for it; delete others.", param="file", code="files_full")
