"""`python -m gateway`: read settings, connect to the store, serve until SIGTERM, then drain open streams.

It listens at once. Until the model's files and a worker are ready, inference routes return 503, and GET /ready reports
the phase.
"""

import asyncio
import logging
import os
import sys
from functools import partial

from aiohttp import web

from gateway.apis.registry import ALL_KINDS, APIS
from gateway.app import RUNNER_OPTIONS, access_of, check, create_app
from gateway.auth.access import check_address
from gateway.auth.api_keys import ApiKeysError
from gateway.http.state import STATE
from gateway.metrics import GatewayMetrics
from gateway.model_service import model_options
from gateway.process import CLOSE_SECONDS, Address, clients_of, new_event_loop, refuse_start, run, serve_app
from gateway.settings import GatewaySettings
from gateway.work.reader_pool import ReaderPool
from gateway.work.reader_process import ReaderProcess
from shared.setting_names import discard_unread_variables
from shared.settings import SettingsError, settings_or_exit
from shared.tracing import TracingUnavailable, open_tracing

logger = logging.getLogger("gateway")

PROGRAM = "pagestream gateway"
# The longest time that another thread, such as one that encodes long JSON, keeps the interpreter from the event loop.
# A first token takes about ten steps of the loop: with Python's default of 5 ms it would arrive 50 ms later.
SWITCH_SECONDS = 0.0001
MAX_PROCESSES = 2  # that read requests; each loads the tokenizer of each model: 110 MB for a vocabulary of 49,152


def main(argv: list[str] | None = None) -> int:
    """Run the gateway. Return the exit status."""
    parent_pid = os.getppid()
    discard_unread_variables(os.environ, PROGRAM)
    arguments = sys.argv[1:] if argv is None else argv
    settings: GatewaySettings = settings_or_exit(GatewaySettings, arguments, os.environ, prog=PROGRAM).settings
    if settings.check:
        return check(PROGRAM, settings)
    sys.setswitchinterval(SWITCH_SECONDS)
    return run(settings, parent_pid, serve(settings))


async def serve(settings: GatewaySettings) -> int:
    """Serve until a signal or a failure. Return the exit status."""
    try:
        models = model_options(settings)
        access = access_of(settings)
        check_address(settings.host, access, allow_unauthenticated=settings.allow_unauthenticated)
        tracing = open_tracing(settings.otlp_traces_endpoint, "pagestream-gateway")
    except (ApiKeysError, SettingsError, TracingUnavailable) as error:
        return refuse_start(PROGRAM, error)
    metrics = GatewayMetrics(vllm_names=settings.vllm_metric_names)
    try:
        clients = clients_of(settings, models, metrics.observe_redis)
        app = create_app(settings, clients, APIS, metrics, access, tracing, ReaderPool(ReaderProcess, MAX_PROCESSES))
    except OSError as error:
        return refuse_start(PROGRAM, f"--files-dir: {error}")
    if new_event_loop is asyncio.new_event_loop:
        logger.warning("uvloop: not installed; asyncio's event loop uses more CPU time per token")
    runner = web.AppRunner(app, shutdown_timeout=CLOSE_SECONDS, **RUNNER_OPTIONS)
    settle = partial(app[STATE].keep_reader_ready, *ALL_KINDS.values())
    try:
        return await serve_app(PROGRAM, runner, _addresses(settings), settle)
    finally:
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _addresses(settings: GatewaySettings) -> list[Address]:
    addresses = [Address(settings.host, settings.port, settings.reuse_port)]
    if settings.own_port is not None:
        addresses.append(Address(settings.host, settings.own_port))
    return addresses


if __name__ == "__main__":
    sys.exit(main())
