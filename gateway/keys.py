"""Where handlers find what the application holds."""

from aiohttp import web

from gateway.state import GatewayState

STATE = web.AppKey("STATE", GatewayState)
