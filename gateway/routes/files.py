"""/v1/files: inputs and results of batches. Served where the gateway has a directory for them.

    POST    multipart: purpose=batch and file; not read until a batch wants it
    GET     the list; /{id}: one; /{id}/content: what is in it
    DELETE  /{id}
"""

import asyncio
from typing import Literal

import msgspec
from aiohttp import web

from gateway.auth.access import ACCOUNT
from gateway.batches.paging import page_of
from gateway.batches.records import DeletedBody, FileBody, FileListBody, FileRecord, file_body
from gateway.batches.service import BATCHES, BatchService
from gateway.batches.uploads import MULTIPART, Upload, receive_upload
from gateway.errors import (
    FileNotFound,
    InvalidRequest,
    MissingParameter,
    UnsupportedParameter,
)
from gateway.keys import STATE
from gateway.openapi import Operation, Parameter

CONTENT = "application/octet-stream"
MAX_LISTED = 10_000


class UploadForm(msgspec.Struct, kw_only=True):
    """For the description alone."""

    file: str
    purpose: Literal["batch"]


async def create_file(http: web.Request) -> web.Response:
    service = http.app[BATCHES]
    upload = await receive_upload(
        http,
        service.files,
        max_bytes=service.max_file_bytes,
        used_bytes=await asyncio.to_thread(service.files.used_bytes),
        max_used_bytes=service.max_files_bytes,
        timeout_seconds=http.app[STATE].settings.body_timeout_seconds,
    )
    try:
        _check_fields(upload)
        owner = http[ACCOUNT].owner_key_hash
        record = await asyncio.to_thread(service.files.keep, upload.part, owner, upload.filename, "batch")
    finally:
        await asyncio.to_thread(upload.part.close)
    return _json(file_body(record))


async def list_files(http: web.Request) -> web.Response:
    purpose, order = http.query.get("purpose"), http.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: expected asc or desc; got {order[:40]!r}.", param="order")
    records = await asyncio.to_thread(http.app[BATCHES].files.list, http[ACCOUNT].owner_key_hash)
    if order == "asc":
        records.reverse()
    items = [(record.id, file_body(record)) for record in records if purpose in (None, record.purpose)]
    page = page_of(items, http.query, default=MAX_LISTED, most=MAX_LISTED)
    first_id, last_id = (page.items[0].id, page.items[-1].id) if page.items else (None, None)
    return _json(FileListBody(data=list(page.items), first_id=first_id, last_id=last_id, has_more=page.has_more))


async def retrieve_file(http: web.Request) -> web.Response:
    return _json(file_body(await _find(http)))


async def download_file(http: web.Request) -> web.StreamResponse:
    record = await _find(http)
    headers = {"Content-Type": CONTENT, "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(http.app[BATCHES].files.content_path(record.id), headers=headers)


async def delete_file(http: web.Request) -> web.Response:
    record = await _find(http)
    await asyncio.to_thread(http.app[BATCHES].files.delete, record.id)
    return _json(DeletedBody(id=record.id))


async def find_file(service: BatchService, file_id: str, owner_key_hash: str) -> FileRecord | None:
    return await asyncio.to_thread(service.files.find, file_id, owner_key_hash)


async def _find(http: web.Request) -> FileRecord:
    record = await find_file(http.app[BATCHES], http.match_info["id"], http[ACCOUNT].owner_key_hash)
    if record is None:
        raise FileNotFound("There is no such file of this key.", param="id")
    return record


def _check_fields(upload: Upload) -> None:
    fields = upload.fields
    if "purpose" not in fields:
        raise MissingParameter("Missing required parameter: purpose.", param="purpose")
    if fields["purpose"] != "batch":
        raise InvalidRequest(f"purpose: expected batch; got {fields['purpose'][:40]!r}.", param="purpose")
    if any(name.startswith("expires_after") for name in fields):
        raise UnsupportedParameter("expires_after: files stay until they are deleted.", param="expires_after")


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/files", create_file),
        web.get("/v1/files", list_files),
        web.get("/v1/files/{id}", retrieve_file),
        web.get("/v1/files/{id}/content", download_file),
        web.delete("/v1/files/{id}", delete_file),
    ]


PAGING_PARAMETERS = (
    Parameter(name="limit", where="query", description="Entries of a page"),
    Parameter(name="after", where="query", description="The id behind which the page begins"),
)

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/files",
        summary="Upload the input of a batch",
        body=UploadForm,
        body_media=MULTIPART,
        answer=FileBody,
    ),
    Operation(
        method="GET",
        path="/v1/files",
        summary="The files of this key",
        answer=FileListBody,
        errors=(InvalidRequest,),
        parameters=(
            *PAGING_PARAMETERS,
            Parameter(name="purpose", where="query", description="Only those"),
            Parameter(name="order", where="query", description="desc, or asc: the oldest first"),
        ),
    ),
    Operation(method="GET", path="/v1/files/{id}", summary="A file", answer=FileBody, errors=(FileNotFound,)),
    Operation(
        method="GET",
        path="/v1/files/{id}/content",
        summary="What is in it",
        media=(CONTENT,),
        other_statuses=(206,),
        errors=(FileNotFound,),
    ),
    Operation(method="DELETE", path="/v1/files/{id}", summary="Delete it", answer=DeletedBody, errors=(FileNotFound,)),
)
