"""The name of a request's route, for labels and counts: the pattern that was matched, never the URL."""

from aiohttp import web

UNKNOWN_ROUTE = "unknown"


def route_name(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else UNKNOWN_ROUTE
