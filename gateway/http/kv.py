"""GET /debug/kv/stream: the workers' KV cache as Server-Sent Events, one snapshot of one worker each.

Shows all models, or the one that ?model= names. A key sees the states of all blocks, but only its own requests.
"""

import msgspec
from aiohttp import web

from gateway.auth.access import ACCOUNT
from gateway.errors import ModelNotFound
from gateway.http import sse
from gateway.http.open_response import OpenResponse
from gateway.http.openapi import EVENTS, MODEL_PARAMETER, Operation
from gateway.http.state import STATE
from gateway.store.kv_watch import snapshots_of
from shared.kv_snapshot import of_tenant

_encode = msgspec.json.encode


async def stream_snapshots(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    name, account = request.query.get("model"), request[ACCOUNT]
    services = state.models.of(account) if name is None else [state.models.find(name, account)]
    stream = OpenResponse(request, web.StreamResponse(headers=sse.HEADERS), state.watch, sse.KEEP_ALIVE)
    await stream.open()
    try:
        async with snapshots_of([service.client.kv for service in services]) as snapshots:
            async for snapshot in snapshots:
                await stream.write(sse.event(_encode(of_tenant(snapshot, account.tenant))))
    finally:
        stream.close()
    return stream.response


OPERATIONS = (
    Operation(
        "GET",
        "/debug/kv/stream",
        stream_snapshots,
        "Stream snapshots of the workers' KV cache, as events",
        media=(EVENTS,),
        errors=(ModelNotFound,),
        parameters=(MODEL_PARAMETER,),
    ),
)
