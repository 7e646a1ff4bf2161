"""create_app(): the batch driver as an application, whose only routes are probes and metrics."""

from collections.abc import Mapping

from aiohttp import web

from gateway.auth.access import Access
from gateway.batches.driver.driver import BatchDriver
from gateway.batches.driver.metrics import DriverMetrics
from gateway.batches.storage.quota import Quota
from gateway.batches.storage.storage import Storage
from gateway.http import admin
from gateway.http.state import STATE, GatewayState
from gateway.metrics import GatewayMetrics
from gateway.model_service import ModelOptions
from gateway.process import inference_clients, owner_task
from gateway.settings import GatewaySettings
from gateway.store.inference_client import InferenceClient


def create_app(
    settings: GatewaySettings,
    clients: Mapping[ModelOptions, InferenceClient],
    metrics: GatewayMetrics,
    access: Access,
) -> web.Application:
    """Build the application. It starts and closes `clients` with itself.

    Args:
        settings: Of a gateway, with a directory of files.
        clients: One per model.
        metrics: Those of the driver are added to its registry.
        access: The API keys, whose batches are driven.

    Raises:
        OSError: If --files-dir cannot be used.
    """
    assert settings.files_dir is not None
    quota = Quota(settings.max_files_bytes, settings.max_files_bytes_per_key)
    storage = Storage(settings.files_dir, quota, int(settings.files_retention_seconds))
    app = web.Application()
    # Without reader processes: a line that is parsed delays no stream of tokens here.
    state = app[STATE] = GatewayState(settings, clients, metrics)
    driver = BatchDriver(storage, state, access, DriverMetrics(metrics.registry), settings.max_batch_concurrency)
    app.add_routes(
        [web.get("/livez", admin.livez), web.get("/readyz", admin.readyz), web.get("/metrics", admin.metrics)]
    )
    app.cleanup_ctx.extend(
        [
            inference_clients,
            owner_task("load_models", state.load_models, may_return=lambda: True),
            owner_task("key_watch", access.watch, may_return=lambda: not access.has_file),
            owner_task("batches", driver.run, storage.close),
        ]
    )
    return app
