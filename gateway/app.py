"""create_app(): builds the gateway's aiohttp application. Parts start and stop in cleanup_ctx; nothing is global."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.auth.access import Access, authenticate, check_address
from gateway.auth.api_keys import ApiKeysError
from gateway.freed_memory import FreedMemory
from gateway.http import admin, fleet, kv, page
from gateway.http.descriptors import watch_descriptors
from gateway.http.dialect import DIALECTS
from gateway.http.middlewares import admit, charge, errors_to_json, identify, measure, set_headers, trace, write_out
from gateway.http.openapi import Operation
from gateway.http.routing import serve_operations
from gateway.http.state import STATE, GatewayState
from gateway.http.unread_bodies import leave_unread
from gateway.metrics import GatewayMetrics
from gateway.model_service import ModelOptions, model_options
from gateway.pipeline.answer_kind import KINDS
from gateway.pipeline.api import Api
from gateway.process import inference_clients, owner_task, refuse_start
from gateway.settings import GatewaySettings
from gateway.store.inference_client import InferenceClient
from gateway.work.reader_pool import ReaderPool
from shared.settings import SettingsError
from shared.tracing import Tracing


class _OfClients(logging.Filter):
    """Drop aiohttp's ERROR lines with tracebacks that clients cause: bytes that are not HTTP, and closed connections.

    Bytes that are not HTTP may contain a key. UnicodeEncodeError is aiohttp's answer to CONNECT with an `Expect` header
    outside UTF-8; it has no route.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | ConnectionError | UnicodeEncodeError)


def server_logger() -> logging.Logger:
    """Return aiohttp's logger, without errors that clients cause."""
    logger = logging.getLogger("gateway.http")
    if not logger.filters:
        logger.addFilter(_OfClients())
    return logger


# handler_cancellation=True: by default a non-streaming handler continues after its client has disconnected.
RUNNER_OPTIONS: dict[str, Any] = {
    "handler_cancellation": True,
    "keepalive_timeout": 30.0,
    "access_log": None,
    "read_bufsize": 2**14,  # bytes of an unread body in memory; with 64 KiB aiohttp buffers up to 640 KiB
    "auto_decompress": False,  # aiohttp would decompress unread bodies: 2 MB of gzip become 2 GB, for seconds
    "logger": server_logger(),
}


def operations_of(apis: Iterable[Api], *, has_page: bool = True) -> list[Operation]:
    """Return the operations of a gateway with these APIs."""
    operations = [operation for api in apis for operation in api.operations]
    operations += [*admin.OPERATIONS, *kv.OPERATIONS, *fleet.OPERATIONS]
    return [*operations, *page.OPERATIONS] if has_page else operations


def access_of(settings: GatewaySettings) -> Access:
    """Read the keys of a gateway. Raises ApiKeysError."""
    return Access(
        settings.api_key,
        settings.api_keys_file,
        allowed_hosts=settings.allowed_hosts,
        open_routes=settings.open_routes,
    )


def check(program: str, settings: GatewaySettings) -> int:
    """Check what a start refuses before it listens, for --check. Return the exit status."""
    try:
        model_options(settings)
        check_address(settings.host, access_of(settings), allow_unauthenticated=settings.allow_unauthenticated)
    except (ApiKeysError, SettingsError) as error:
        return refuse_start(program, error)
    return 0


def create_app(
    settings: GatewaySettings,
    clients: Mapping[ModelOptions, InferenceClient],
    apis: Sequence[Api],
    metrics: GatewayMetrics | None = None,
    access: Access | None = None,
    tracing: Tracing | None = None,
    readers: ReaderPool | None = None,
) -> web.Application:
    """Build the application. It starts and closes `clients` and `readers` with itself.

    Args:
        settings: The gateway's settings.
        clients: One per model.
        apis: Those to serve, as far as the settings allow (apis/registry.py).
        metrics: Default: a new registry.
        access: Default: from the settings.
        tracing: None: no spans.
        readers: For long requests; None: threads.

    Raises:
        ApiKeysError: If the file of keys cannot be used.
        OSError: If --files-dir cannot be used.
    """
    metrics = metrics or GatewayMetrics(vllm_names=settings.vllm_metric_names)
    access = access or access_of(settings)
    state = GatewayState(settings, clients, metrics, readers)
    app = web.Application(
        middlewares=[
            leave_unread(state.read_turns),
            identify,
            measure(metrics),
            trace(tracing),
            errors_to_json,
            authenticate(access),
            charge,
            admit,
            write_out,
        ],
    )
    served = [api for api in apis if api.is_served(settings)]
    app[KINDS] = {kind.name: kind for api in served for kind in api.kinds}
    app[DIALECTS] = tuple(api.dialect for api in served if api.dialect is not None)
    app[STATE] = state
    app.on_response_prepare.append(set_headers)
    serve_operations(app, operations_of(served, has_page=settings.ui))
    runs = [
        owner_task("load_models", state.load_models, may_return=lambda: True),
        owner_task("stream_watch", state.watch.run),
        owner_task("key_watch", access.watch, may_return=lambda: not access.has_file),
        owner_task("limits", lambda: state.limits.share(access.accounts)),
        owner_task("descriptor_watch", watch_descriptors),
        owner_task("freed_memory", FreedMemory(state.num_streams).watch),
    ]
    runs += [api.start(app) for api in served if api.start is not None]
    app.cleanup_ctx.extend([inference_clients, *runs])
    return app
