"""/v1/files: inputs and results of batches. Served if the gateway has a directory for them.

POST    uploads a file (multipart: purpose=batch and file); a batch that uses it validates it
GET     lists files; /{id}: one; /{id}/content: its content
DELETE  /{id}
"""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Literal

import msgspec
from aiohttp import web

from gateway.apis.files.directory import FILES, FilesDirectory
from gateway.apis.files.uploads import MULTIPART, receive_upload
from gateway.auth.access import ACCOUNT
from gateway.batches.storage.disk import ended
from gateway.batches.storage.quota import StorageFull
from gateway.batches.storage.records import DeletedBody, FileBody, FileListBody, FileRecord, file_body
from gateway.errors import DiskFull, FileNotFound, FilesFull, InvalidRequest, MissingParameter
from gateway.http.openapi import Operation, Parameter
from gateway.http.query_fields import page_of, page_query, query_choice
from gateway.http.state import STATE
from gateway.pipeline.context import context_of

CONTENT = "application/octet-stream"
MAX_LISTED = 10_000
MIN_EXPIRY_SECONDS = 3600  # OpenAI's

logger = logging.getLogger("gateway")


class UploadForm(msgspec.Struct, kw_only=True):
    """The multipart fields of an upload."""

    file: str
    purpose: Literal["batch"]


async def create_file(http: web.Request) -> web.Response:
    with storage_errors(param="file"):
        return as_json(file_body(await _received(http)))


async def _received(http: web.Request) -> FileRecord:
    directory = http.app[FILES]
    storage = directory.storage
    work = partial(http.app[STATE].pool.run, ("files of", http[ACCOUNT].owner_key_hash), None)
    upload = await receive_upload(
        http,
        storage.files,
        work,
        owner_key_hash=http[ACCOUNT].owner_key_hash,
        max_bytes=directory.max_file_bytes,
        timeout_seconds=http.app[STATE].settings.body_timeout_seconds,
    )
    try:
        expires_seconds = _checked(upload.fields, storage.retention_seconds)
        return await ended(work(partial(storage.files.keep, upload.part, upload.filename, "batch", expires_seconds)))
    finally:
        await ended(work(upload.part.close))


async def list_files(http: web.Request) -> web.Response:
    purpose, order = http.query.get("purpose"), query_choice(http.query, "order", ("asc", "desc"), "desc")
    query = page_query(http.query, default=MAX_LISTED, max_limit=MAX_LISTED)
    files, owner = http.app[FILES].storage.files, http[ACCOUNT].owner_key_hash

    def listed() -> bytes:
        records = files.page(owner, limit=query.limit + 1, purpose=purpose, after=query.after, ascending=order == "asc")
        return page_of(FileListBody, records, query, file_body)

    # A page of 10,000 is slow; a twentieth of the time holds the GIL.
    return as_json(await context_of(http).work(None, listed))


async def retrieve_file(http: web.Request) -> web.Response:
    return as_json(file_body(await _find(http)))


async def download_file(http: web.Request) -> web.StreamResponse:
    record = await _find(http)
    headers = {"Content-Type": CONTENT, "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(http.app[FILES].storage.files.content_path(record.id), headers=headers)


async def delete_file(http: web.Request) -> web.Response:
    record = await _find(http)
    await asyncio.to_thread(http.app[FILES].storage.files.delete, record.id)
    return as_json(DeletedBody(id=record.id))


async def find_file(directory: FilesDirectory, file_id: str, owner_key_hash: str) -> FileRecord | None:
    return await asyncio.to_thread(directory.storage.files.find, file_id, owner_key_hash)


async def _find(http: web.Request) -> FileRecord:
    record = await find_file(http.app[FILES], http.match_info["id"], http[ACCOUNT].owner_key_hash)
    if record is None:
        raise FileNotFound("This API key has no such file.", param="id")
    return record


def _checked(fields: dict[str, str], retention_seconds: int) -> int | None:
    """Return after how many seconds the file expires; None if not given. Raise InvalidRequest."""
    if "purpose" not in fields:
        raise MissingParameter("Missing required parameter: purpose.", param="purpose")
    if fields["purpose"] != "batch":
        raise InvalidRequest(f"purpose: expected batch; got {fields['purpose'][:40]!r}.", param="purpose")
    anchor, text = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(
            f"expires_after[anchor]: expected created_at; got {(anchor or '')[:40]!r}.", param="expires_after[anchor]"
        )
    text = text or ""
    seconds = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    return checked_expiry(seconds, retention_seconds, "expires_after[seconds]", text)


def checked_expiry(seconds: int, retention_seconds: int, param: str, given: object) -> int:
    """Return `seconds` if they are in the allowed range. Raise InvalidRequest, which shows `given`."""
    if not MIN_EXPIRY_SECONDS <= seconds <= retention_seconds:
        raise InvalidRequest(
            f"{param}: expected {MIN_EXPIRY_SECONDS} to {retention_seconds}; got {str(given)[:40]!r}.", param=param
        )
    return seconds


@contextlib.contextmanager
def storage_errors(param: str | None = None) -> Iterator[None]:
    """Convert a full quota to FilesFull, which names `param`, and a full disk to DiskFull."""
    try:
        yield
    except StorageFull as error:
        raise FilesFull(error.message, param=param, code=error.code) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        logger.error("files directory: disk full: %s", error)
        raise DiskFull("The server's disk is full. The operator must free space in --files-dir.") from error


def as_json(body: msgspec.Struct | bytes, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a JSON response; `body` is a struct, or encoded JSON."""
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(body=encoded, content_type="application/json", headers=headers)


PAGING_PARAMETERS = (
    Parameter(name="limit", where="query", description="Page size"),
    Parameter(name="after", where="query", description="Id of the last entry of the previous page"),
)

OPERATIONS = (
    Operation(
        "POST",
        "/v1/files",
        create_file,
        "Upload the input file of a batch",
        body=UploadForm,
        body_media=MULTIPART,
        answer=FileBody,
        errors=(FilesFull, DiskFull),
    ),
    Operation(
        "GET",
        "/v1/files",
        list_files,
        "List the files of this key",
        answer=FileListBody,
        errors=(InvalidRequest,),
        parameters=(
            *PAGING_PARAMETERS,
            Parameter(name="purpose", where="query", description="Only files with this purpose"),
            Parameter(name="order", where="query", description="desc (default, newest first) or asc"),
        ),
    ),
    Operation(
        "GET", "/v1/files/{id}", retrieve_file, "Retrieve a file's metadata", answer=FileBody, errors=(FileNotFound,)
    ),
    Operation(
        "GET",
        "/v1/files/{id}/content",
        download_file,
        "Download a file's content",
        media=(CONTENT,),
        other_statuses=(206,),
        errors=(FileNotFound,),
    ),
    Operation("DELETE", "/v1/files/{id}", delete_file, "Delete a file", answer=DeletedBody, errors=(FileNotFound,)),
)
