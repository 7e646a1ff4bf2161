"""GET /debug/kv/stream: the workers' KV memory as Server-Sent Events, one snapshot of one worker each."""

import msgspec
from aiohttp import web

from gateway.http import sse
from gateway.http.event_stream import EventStream
from gateway.keys import STATE
from gateway.openapi import EVENTS, Operation

_encode = msgspec.json.encode


async def stream_snapshots(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    stream = EventStream(request, {}, state.watch)
    await stream.open()
    try:
        async with state.client.kv.watcher() as snapshots:
            async for snapshot in snapshots:
                await stream.write(sse.event(_encode(snapshot)))
    finally:
        stream.close()
    return stream.response


def routes() -> list[web.RouteDef]:
    return [web.get("/debug/kv/stream", stream_snapshots)]


OPERATIONS = (
    Operation(
        method="GET",
        path="/debug/kv/stream",
        summary="The workers' KV memory as it changes, as events",
        media=(EVENTS,),
    ),
)
