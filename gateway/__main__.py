"""`python -m gateway`: read settings, connect to the store, serve until SIGTERM, then drain open streams.

It listens at once. Until the model's files and a worker are ready, inference routes return 503, and GET /ready reports
the phase.
"""

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from aiohttp import web

from gateway.apis.registry import ALL_KINDS, APIS
from gateway.app import RUNNER_OPTIONS, create_app
from gateway.auth.access import Access, check_address
from gateway.auth.api_keys import ApiKeysError
from gateway.http.state import STATE, GatewayState
from gateway.large_buffers import return_large_buffers
from gateway.metrics import GatewayMetrics
from gateway.model_service import ModelOptions, model_options
from gateway.settings import GatewaySettings
from gateway.store.inference_client import InferenceClient
from gateway.work.work_process import WorkProcesses
from shared.garbage_collection import search_rarely
from shared.logs import configure_logging
from shared.processes import ParentGone, exit_with_parent
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import RedisKeys
from shared.settings import SettingsError, settings_or_exit
from shared.tasks import cancel_and_wait
from shared.tracing import TracingUnavailable, open_tracing

logger = logging.getLogger("gateway")

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop

    new_event_loop = uvloop.new_event_loop  # sends the writes of one loop iteration together, in C (ADR 144)
except ImportError:  # uvloop has no build for this system
    new_event_loop = asyncio.new_event_loop

# The longest time that another thread, such as one that encodes long JSON, keeps the interpreter from the event loop.
# A first token takes about ten steps of the loop: with Python's default of 5 ms it would arrive 50 ms later.
SWITCH_SECONDS = 0.0001
EXIT_FAILED, EXIT_CANNOT_START = 1, 2
# Connections waiting for accept(). With aiohttp's default of 128 a burst of 1,000 clients overflows, and TCP retries
# after 1 s and 3 s. The kernel caps the value at net.core.somaxconn, 4,096 by default.
LISTEN_BACKLOG = 4096
_CLOSE_SECONDS = 2.0  # for connections, after the drain


def main(argv: list[str] | None = None) -> int:
    """Run the gateway. Return the exit status."""
    parent_pid = os.getppid()
    arguments = sys.argv[1:] if argv is None else argv
    settings: GatewaySettings = settings_or_exit(
        GatewaySettings, arguments, os.environ, prog="pagestream gateway"
    ).settings
    configure_logging(settings.log_format)
    if settings.exit_with_parent:
        try:
            exit_with_parent(parent_pid)
        except ParentGone:
            return 0
    sys.setswitchinterval(SWITCH_SECONDS)
    return_large_buffers()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serve(settings))


async def serve(settings: GatewaySettings) -> int:
    """Serve until a signal or a failure. Return the exit status."""
    try:
        models = model_options(settings)
        access = Access(
            settings.api_key,
            settings.api_keys_file,
            allowed_hosts=settings.allowed_hosts,
            open_routes=settings.open_routes,
        )
        check_address(settings.host, access, allow_unauthenticated=settings.allow_unauthenticated)
        tracing = open_tracing(settings.otlp_traces_endpoint, "pagestream-gateway")
    except (ApiKeysError, SettingsError, TracingUnavailable) as error:
        sys.stderr.write(f"pagestream gateway: error: {error}\n")
        return EXIT_CANNOT_START
    metrics = GatewayMetrics(vllm_names=settings.vllm_metric_names)
    connections = connect(settings.redis_url, observe=metrics.observe_redis, num_models=len(models))
    try:
        clients = _clients(settings, models, connections)
        app = create_app(settings, clients, APIS, metrics, access, tracing, WorkProcesses())
    except OSError as error:
        sys.stderr.write(f"pagestream gateway: error: --files-dir: {error}\n")
        return EXIT_CANNOT_START
    if new_event_loop is asyncio.new_event_loop:
        logger.warning("uvloop: not installed; asyncio's event loop uses more CPU time per token")
    runner = web.AppRunner(app, shutdown_timeout=_CLOSE_SECONDS, **RUNNER_OPTIONS)
    await runner.setup()
    owners = app[STATE].owners
    try:
        try:
            sites = await _listen(runner, settings, ", ".join(options.name for options in models))
        except _CannotListen as error:
            sys.stderr.write(f"pagestream gateway: cannot listen on {error}\n")
            return EXIT_FAILED
        is_drained = await _until_drained(app[STATE], sites)
        if owners.failed.is_set():
            _end_at_once(EXIT_CANNOT_START if owners.is_refused else EXIT_FAILED)
        if not is_drained:
            return EXIT_FAILED
    finally:
        await runner.cleanup()
        await connections.aclose()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    return 0


def _end_at_once(status: int) -> NoReturn:
    """Exit without cleanup, which could wait for the task that failed. Clients resume at another gateway."""
    logging.shutdown()
    os._exit(status)


def _clients(
    settings: GatewaySettings, models: Sequence[ModelOptions], connections: RedisConnections
) -> dict[ModelOptions, InferenceClient]:
    """Return one client per model; all share one gateway id."""
    gateway_id = secrets.token_hex(8)
    return {
        options: InferenceClient(
            connections,
            RedisKeys(options.name),
            gateway_id,
            max_queued_requests=settings.max_num_queued_reqs,
            max_queued_tokens=settings.max_num_queued_tokens,
        )
        for options in models
    }


async def _until_drained(state: GatewayState, sites: Sequence[web.BaseSite]) -> bool:
    """Serve until a signal, then drain. Return False if the model cannot be served or an owner task failed."""
    settling = state.owners.start("settle", _settle(state), may_return=lambda: True)
    try:
        if not await _until_signal(state):
            return False
    finally:
        settling.cancel()
    state.open_requests.draining = True
    for site in sites:
        await site.stop()
    await _until_first(_drain(state), state.owners.failed.wait())
    return not state.owners.failed.is_set()


async def _drain(state: GatewayState) -> None:
    drain_seconds = state.settings.drain_seconds
    if not await state.open_requests.wait_idle(drain_seconds):
        logger.warning("drain: timeout reached after %g s; some streams are still open", drain_seconds)


async def _settle(state: GatewayState) -> None:
    await state.models_loaded.wait()
    search_rarely()
    await state.keep_reader_ready(*ALL_KINDS.values())


class _CannotListen(Exception):
    """An address cannot be bound; the message is the address and the system's error."""


async def _listen(runner: web.AppRunner, settings: GatewaySettings, names: str) -> list[web.TCPSite]:
    sites = []
    ports = [(settings.port, settings.reuse_port)]
    if settings.own_port is not None:
        ports.append((settings.own_port, False))
    for asked_port, is_shared in ports:
        site = web.TCPSite(runner, settings.host, asked_port, backlog=LISTEN_BACKLOG, reuse_port=is_shared or None)
        try:
            await site.start()
        except OSError as error:
            raise _CannotListen(f"{settings.host}:{asked_port}: {error.strerror}") from error
        sites.append(site)
        host, port = runner.addresses[-1][:2]
        logger.info("listening on http://%s:%s", host, port, extra={"model": names})
    return sites


async def _until_signal(state: GatewayState) -> bool:
    """Return whether a signal came; False if the model cannot be served or an owner task failed."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await _until_first(stop.wait(), state.model_failed.wait(), state.owners.failed.wait())
    return stop.is_set() and not state.owners.failed.is_set()


async def _until_first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(tasks)


if __name__ == "__main__":
    sys.exit(main())
