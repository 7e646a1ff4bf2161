"""/v1/batches: many requests out of a file, each answered once, behind everybody else's.

    POST  input_file_id, endpoint, completion_window: begins it
    GET   the list; /{id}: how far one is
    POST  /{id}/cancel
"""

import asyncio
from typing import Literal

import msgspec
from aiohttp import web

from gateway.answers.answering import ignored_header
from gateway.auth.access import ACCOUNT
from gateway.batches.batch_store import BatchFolder
from gateway.batches.paging import page_of
from gateway.batches.records import BatchBody, BatchListBody, Metadata
from gateway.batches.service import BATCHES
from gateway.errors import BatchEnded, BatchNotFound, BodyTooLarge, InvalidRequest
from gateway.http.http_body import read_body
from gateway.keys import STATE
from gateway.openapi import Operation
from gateway.requests.openai_schema import check_other_fields
from gateway.requests.request_body import decode_body
from gateway.routes.files import PAGING_PARAMETERS, find_file


class CreateBatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]  # OpenAI's only one; a batch here is never given up for its age
    metadata: Metadata | None = None


_UNSUPPORTED: dict[str, tuple[object, ...]] = {"output_expires_after": ()}


async def create_batch(http: web.Request) -> web.Response:
    service, owner = http.app[BATCHES], http[ACCOUNT].owner_key_hash
    body = await read_body(http, http.app[STATE].settings.body_timeout_seconds)
    fields, given = decode_body(body, CreateBatchBody)
    ignored = check_other_fields(CreateBatchBody, given, _UNSUPPORTED)
    record = await find_file(service, fields.input_file_id, owner)
    if record is None or record.purpose != "batch":
        raise _no_input()
    if await asyncio.to_thread(service.files.used_bytes) >= service.max_files_bytes:
        raise BodyTooLarge("There is no room for results; delete files.", code="files_full")
    path = service.files.content_path(record.id)
    try:
        folder = await asyncio.to_thread(
            service.batches.create,
            owner, fields.endpoint, record.id, path, fields.completion_window, fields.metadata,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise _no_input() from error
    service.wake()
    return await _shown(folder, ignored_header(ignored))


async def list_batches(http: web.Request) -> web.Response:
    folders = await asyncio.to_thread(http.app[BATCHES].batches.list, http[ACCOUNT].owner_key_hash)
    page = page_of([(folder.record.id, folder) for folder in folders], http.query, default=20, most=100)
    bodies = await asyncio.to_thread(lambda: [folder.body() for folder in page.items])
    first_id, last_id = (bodies[0].id, bodies[-1].id) if bodies else (None, None)
    listed = BatchListBody(data=bodies, first_id=first_id, last_id=last_id, has_more=page.has_more)
    return web.Response(body=msgspec.json.encode(listed), content_type="application/json")


async def retrieve_batch(http: web.Request) -> web.Response:
    return await _shown(await _find(http))


async def cancel_batch(http: web.Request) -> web.Response:
    """What is in flight is withdrawn; results that are there become files."""
    folder = await _find(http)
    status = (await asyncio.to_thread(folder.read_progress)).status
    if status in ("failed", "completed"):
        raise BatchEnded(f"A batch that is {status} cannot be cancelled.")
    await asyncio.to_thread(folder.cancel)
    return await _shown(folder)


async def _find(http: web.Request) -> BatchFolder:
    batch_id, owner = http.match_info["id"], http[ACCOUNT].owner_key_hash
    folder = await asyncio.to_thread(http.app[BATCHES].batches.find, batch_id, owner)
    if folder is None:
        raise BatchNotFound("There is no such batch of this key.", param="id")
    return folder


async def _shown(folder: BatchFolder, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(await asyncio.to_thread(folder.body))
    return web.Response(body=body, content_type="application/json", headers=headers)


def _no_input() -> InvalidRequest:
    return InvalidRequest(
        "input_file_id: expected the id of a file of this key, uploaded for the purpose batch.", param="input_file_id"
    )


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/batches", create_batch),
        web.get("/v1/batches", list_batches),
        web.get("/v1/batches/{id}", retrieve_batch),
        web.post("/v1/batches/{id}/cancel", cancel_batch),
    ]


OPERATIONS = (
    Operation(method="POST", path="/v1/batches", summary="Begin a batch", body=CreateBatchBody, answer=BatchBody),
    Operation(
        method="GET",
        path="/v1/batches",
        summary="The batches of this key, the newest first",
        answer=BatchListBody,
        errors=(InvalidRequest,),
        parameters=PAGING_PARAMETERS,
    ),
    Operation(method="GET", path="/v1/batches/{id}", summary="A batch", answer=BatchBody, errors=(BatchNotFound,)),
    Operation(
        method="POST",
        path="/v1/batches/{id}/cancel",
        summary="Cancel it",
        answer=BatchBody,
        errors=(BatchNotFound, BatchEnded),
    ),
)
