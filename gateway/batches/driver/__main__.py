"""`python -m gateway.batches.driver`: drive the batches of --files-dir until SIGTERM.

On SIGTERM it leaves its batches at once: lines in flight continue at the workers, and the next driver attaches to them.
"""

import asyncio
import os
import sys
from functools import partial

from aiohttp import web

from gateway.app import check
from gateway.auth.access import Access
from gateway.auth.api_keys import ApiKeysError
from gateway.batches.driver.app import create_app
from gateway.batches.driver.settings import DriverSettings
from gateway.metrics import GatewayMetrics
from gateway.model_service import model_options
from gateway.process import CLOSE_SECONDS, Address, clients_of, refuse_start, run, serve_app
from shared.setting_names import discard_unread_variables
from shared.settings import SettingsError, settings_or_exit

PROGRAM = "pagestream batches"


def main(argv: list[str] | None = None) -> int:
    """Run the driver. Return the exit status."""
    parent_pid = os.getppid()
    discard_unread_variables(os.environ, PROGRAM)
    arguments = sys.argv[1:] if argv is None else argv
    settings: DriverSettings = settings_or_exit(
        DriverSettings, arguments, os.environ, prog=PROGRAM, tables=("gateway",)
    ).settings
    if settings.gateway.check:
        return check(PROGRAM, settings.gateway)
    return run(settings.gateway, parent_pid, serve(settings))


async def serve(settings: DriverSettings) -> int:
    """Drive batches until a signal or a failure. Return the exit status."""
    gateway = settings.gateway
    try:
        models = model_options(gateway)
        access = Access(gateway.api_key, gateway.api_keys_file)
    except (ApiKeysError, SettingsError) as error:
        return refuse_start(PROGRAM, error)
    metrics = GatewayMetrics()
    try:
        app = create_app(gateway, clients_of(gateway, models, metrics.observe_redis), metrics, access)
    except OSError as error:
        return refuse_start(PROGRAM, f"--files-dir: {error}")
    runner = web.AppRunner(app, shutdown_timeout=CLOSE_SECONDS, access_log=None)
    address = Address(settings.metrics_host, settings.metrics_port)
    return await serve_app(PROGRAM, runner, [address], partial(asyncio.sleep, 0))


if __name__ == "__main__":
    sys.exit(main())
