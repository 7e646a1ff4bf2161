"""/v1/batches: many requests from a file, each answered once, at a lower priority than interactive requests.

POST    creates a batch from input_file_id, endpoint, and completion_window
GET     lists batches; /{id}: the status of one
POST    /{id}/cancel
DELETE  /{id}: deletes an ended batch; OpenAI has no such route
"""

import asyncio
from functools import partial
from typing import Literal

import msgspec
from aiohttp import web

from gateway.apis.files.directory import FILES
from gateway.apis.files.files import PAGING_PARAMETERS, as_json, checked_expiry, find_file, storage_errors
from gateway.auth.access import ACCOUNT
from gateway.batches.storage.batch_store import BatchFolder
from gateway.batches.storage.disk import to_the_end
from gateway.batches.storage.records import BatchBody, BatchListBody, DeletedBody, Metadata
from gateway.errors import BatchEnded, BatchNotEnded, BatchNotFound, DiskFull, FilesFull, InvalidRequest
from gateway.http.body import received_body
from gateway.http.json_body import decode_body
from gateway.http.openapi import Operation
from gateway.http.query_fields import page_of, page_query
from gateway.pipeline.context import context_of
from gateway.pipeline.request import check_other_fields
from gateway.pipeline.submission import ignored_header


class ExpiresAfter(msgspec.Struct, kw_only=True):
    anchor: Literal["created_at"]
    seconds: int


class CreateBatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]  # OpenAI's only value; batches do not expire here
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


_UNSUPPORTED: dict[str, tuple[object, ...]] = {}


async def create_batch(http: web.Request) -> web.Response:
    directory, owner = http.app[FILES], http[ACCOUNT].owner_key_hash
    async with received_body(http) as data:
        body = await context_of(http).read(len(data), partial(decode_body, data))
    fields = body.typed(CreateBatchBody)
    ignored = check_other_fields(CreateBatchBody, body.given, _UNSUPPORTED)
    record = await find_file(directory, fields.input_file_id, owner)
    if record is None or record.purpose != "batch":
        raise _no_input()
    expires_seconds = None
    if (after := fields.output_expires_after) is not None:
        param = "output_expires_after.seconds"
        expires_seconds = checked_expiry(after.seconds, directory.storage.retention_seconds, param, after.seconds)
    path = directory.storage.files.content_path(record.id)
    try:
        with storage_errors():
            folder = await to_the_end(
                directory.storage.batches.create,
                owner, fields.endpoint, record.id, path, fields.completion_window, fields.metadata, expires_seconds,
            )  # fmt: skip
    except FileNotFoundError as error:
        raise _no_input() from error
    return await _shown(folder, ignored_header(ignored))


async def list_batches(http: web.Request) -> web.Response:
    query = page_query(http.query, default=20, max_limit=100)
    batches, owner = http.app[FILES].storage.batches, http[ACCOUNT].owner_key_hash

    def listed() -> bytes:
        found = batches.page(owner, limit=query.limit + 1, after=query.after)
        return page_of(BatchListBody, found, query, BatchFolder.body)

    return as_json(await context_of(http).work(None, listed))


async def retrieve_batch(http: web.Request) -> web.Response:
    return await _shown(await _find(http))


async def cancel_batch(http: web.Request) -> web.Response:
    """Cancel a batch: lines in flight are withdrawn; existing results become files."""
    folder = await _find(http)
    status = (await asyncio.to_thread(folder.read_progress)).status
    if status in ("failed", "completed"):
        raise BatchEnded(f"A batch that is {status} cannot be cancelled.")
    await to_the_end(http.app[FILES].storage.batches.cancel, folder)
    return await _shown(folder)


async def delete_batch(http: web.Request) -> web.Response:
    """Delete an ended batch; its files stay."""
    folder = await _find(http)
    progress = await asyncio.to_thread(folder.read_progress)
    if not progress.has_ended:
        raise BatchNotEnded("A batch that has not ended cannot be deleted. Cancel it first.")
    await to_the_end(http.app[FILES].storage.batches.delete, folder.record.id)
    return as_json(DeletedBody(id=folder.record.id, object="batch"))


async def _find(http: web.Request) -> BatchFolder:
    batch_id, owner = http.match_info["id"], http[ACCOUNT].owner_key_hash
    folder = await asyncio.to_thread(http.app[FILES].storage.batches.find, batch_id, owner)
    if folder is None:
        raise BatchNotFound("This API key has no such batch.", param="id")
    return folder


async def _shown(folder: BatchFolder, headers: dict[str, str] | None = None) -> web.Response:
    return as_json(await asyncio.to_thread(folder.body), headers)


def _no_input() -> InvalidRequest:
    return InvalidRequest(
        "input_file_id: expected the id of a file of this API key with purpose=batch.", param="input_file_id"
    )


OPERATIONS = (
    Operation(
        "POST",
        "/v1/batches",
        create_batch,
        "Create a batch",
        body=CreateBatchBody,
        answer=BatchBody,
        errors=(FilesFull, DiskFull),
    ),
    Operation(
        "GET",
        "/v1/batches",
        list_batches,
        "List the batches of this key, newest first",
        answer=BatchListBody,
        errors=(InvalidRequest,),
        parameters=PAGING_PARAMETERS,
    ),
    Operation("GET", "/v1/batches/{id}", retrieve_batch, "Retrieve a batch", answer=BatchBody, errors=(BatchNotFound,)),
    Operation(
        "POST",
        "/v1/batches/{id}/cancel",
        cancel_batch,
        "Cancel a batch",
        answer=BatchBody,
        errors=(BatchNotFound, BatchEnded),
    ),
    Operation(
        "DELETE",
        "/v1/batches/{id}",
        delete_batch,
        "Delete an ended batch; its files stay",
        answer=DeletedBody,
        errors=(BatchNotFound, BatchNotEnded),
    ),
)
