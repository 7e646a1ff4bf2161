"""python -m gateway: settings -> client -> app -> serve until SIGTERM, then let open streams end.

Listens at once; until the model's files and a worker are there, inference routes answer 503 and /ready tells why.

It runs before any walk. It knows the process alone: no route, no request, no model's text.
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

from gateway.answers.answer_kinds import KINDS
from gateway.app import RUNNER_OPTIONS, create_app
from gateway.auth.access import Access, check_address
from gateway.auth.api_keys import ApiKeysError
from gateway.large_buffers import return_large_buffers
from gateway.metrics import GatewayMetrics
from gateway.model_service import ModelOptions, model_options
from gateway.settings import GatewaySettings
from gateway.state import STATE, GatewayState
from gateway.store.inference_client import InferenceClient
from gateway.work_process import WorkProcesses
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

    new_event_loop = uvloop.new_event_loop  # writes of one turn leave together, without Python between them (ADR 144)
except ImportError:  # it is not built for this system
    new_event_loop = asyncio.new_event_loop

# What runs beside the event loop, such as a long answer's JSON, keeps the interpreter so long when the loop wants it
# back. With Python's own 5 ms a first token, of which the loop has ten things to do, comes 50 ms later.
SWITCH_SECONDS = 0.0001
EXIT_FAILED, EXIT_CANNOT_START = 1, 2
# Connections that wait to be accepted. aiohttp's own 128 drops the rest of a burst of 1,000 clients, and TCP asks again
# after 1 s, then after 2 s more. The kernel caps it at net.core.somaxconn, by default 4,096.
LISTEN_BACKLOG = 4096
_CLOSE_SECONDS = 2.0  # for connections, after the drain


def main(argv: list[str] | None = None) -> int:
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
    try:
        models = model_options(settings)
        access = Access(settings.api_key, settings.api_keys_file, allowed_hosts=settings.allowed_hosts)
        check_address(settings.host, access, allow_unauthenticated=settings.allow_unauthenticated)
        tracing = open_tracing(settings.otlp_traces_endpoint, "pagestream-gateway")
    except (ApiKeysError, SettingsError, TracingUnavailable) as error:
        sys.stderr.write(f"pagestream gateway: error: {error}\n")
        return EXIT_CANNOT_START
    metrics = GatewayMetrics(vllm_names=settings.vllm_metric_names)
    connections = connect(settings.redis_url, observe=metrics.observe_redis, num_models=len(models))
    try:
        clients = _clients(settings, models, connections)
        app = create_app(settings, clients, metrics, access, tracing, WorkProcesses())
    except OSError as error:
        sys.stderr.write(f"pagestream gateway: error: --files-dir: {error}\n")
        return EXIT_CANNOT_START
    if new_event_loop is asyncio.new_event_loop:
        logger.warning("uvloop is not installed: on asyncio's own event loop tokens cost more CPU time")
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
    """What an orderly end waits for may be what failed. Clients resume at another gateway, or at the next life."""
    logging.shutdown()
    os._exit(status)


def _clients(
    settings: GatewaySettings, models: Sequence[ModelOptions], connections: RedisConnections
) -> dict[ModelOptions, InferenceClient]:
    """One a model; all are of one gateway."""
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
    """Serves until a signal, and then what is open. False: the model cannot be served, or an owner task failed."""
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
        logger.warning("streams were still open after %g s", drain_seconds)


async def _settle(state: GatewayState) -> None:
    await state.models_loaded.wait()
    search_rarely()
    await state.keep_reader_ready(*KINDS.values())


class _CannotListen(Exception):
    """The message is the address and what is wrong with it."""


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
    """False: there is nothing to serve, and there will not be; or an owner task failed."""
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
