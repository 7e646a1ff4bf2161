"""Record the golden files: answers through the real gateway application, metrics, and the options of each program."""

import asyncio
import contextlib
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from engine_worker.settings import WorkerSettings
from gateway.apis.registry import APIS
from gateway.app import RUNNER_OPTIONS, create_app
from gateway.batches.driver.metrics import DriverMetrics
from gateway.batches.driver.settings import DriverSettings
from gateway.http.state import STATE, GatewayState
from gateway.metrics import DeliveryCollector, GatewayMetrics, ModelMetrics
from gateway.model_service import model_options
from gateway.settings import GatewaySettings
from gateway.store.store_calls import QueueFull, StoreUnavailable
from gateway.store.stream_table import DeliveryCounts, StreamTable
from pagestream.serve_settings import ServeSettings
from shared.settings import load_settings
from shared.vllm_metric_names import VllmNames
from tests.golden.cases import KINDS, Call, calls_of
from tests.golden.engine import KeepingInferenceClient, fails, says_text
from tests.golden.normalized import normalized
from tests.monitoring.loaded_worker import LoadedWorker

MAX_MODEL_LEN = 4096  # tool definitions take a few hundred tokens
KEY = "sk-golden-0123456789abcdef"
PROGRAMS = {"serve": ServeSettings, "gateway": GatewaySettings, "worker": WorkerSettings, "batches": DriverSettings}
_UNSTEADY_HEADERS = frozenset(("date", "content-length"))  # the lengths of ids and times vary
_REFUSALS = {"queue_full": QueueFull("full"), "store_unavailable": StoreUnavailable("gone")}
_ANSWER_ID = re.compile(r'"id": ?"[a-z]+[-_]([0-9a-f]{32})"')


async def recorded(model: Path) -> dict[str, str]:
    """Return the text of each golden file by name. `model` is a directory made by write_tiny_model()."""
    files = {f"answers_{name}.txt": await _answers(name, model) for name in KINDS}
    files["metrics.txt"] = _metrics()
    files["show_config.txt"] = "\n".join(_configuration(program) for program in PROGRAMS)
    return files


async def _answers(name: str, model: Path) -> str:
    parts = []
    async with _running(model) as (session, state, engine):
        encoder = next(iter(state.models)).require_model().encoder
        answer_id = ""
        for call in calls_of(KINDS[name]):
            engine.script = says_text(encoder.encode_text, call.says) if call.fails is None else fails(call.fails)
            engine.submit_error = _REFUSALS.get(call.refusal)
            answer, body = await _made(session, call, answer_id)
            if found := _ANSWER_ID.search(body):
                answer_id = found[1]
            parts.append(answer)
    return "\n".join(parts)


async def _made(session: aiohttp.ClientSession, call: Call, answer_id: str) -> tuple[str, str]:
    data = call.body if isinstance(call.body, bytes) or call.body is None else json.dumps(call.body).encode()
    headers = {"Authorization": f"Bearer {KEY}"}
    if data is not None:
        headers["Content-Type"] = "application/json"
    headers |= call.headers
    path = call.path.replace("{id}", answer_id)
    async with session.request(call.method, path, data=data, headers=headers) as response:
        body = await response.text()
    shown = sorted(
        f"{name}: {value}" for name, value in response.headers.items() if name.lower() not in _UNSTEADY_HEADERS
    )
    asked = call.body.decode() if isinstance(call.body, bytes) else "" if call.body is None else json.dumps(call.body)
    lines = [f"## {call.name}", f"{call.method} {call.path} {asked}".rstrip(), str(response.status), *shown, "", body]
    return normalized("\n".join(lines)).rstrip("\n") + "\n", body


@asynccontextmanager
async def _running(
    model: Path,
) -> AsyncIterator[tuple[aiohttp.ClientSession, GatewayState, KeepingInferenceClient]]:
    settings = GatewaySettings(model=model, served_model_name=("tiny",), api_key=KEY)
    (options,), engine = model_options(settings), KeepingInferenceClient()
    app = create_app(settings, {options: engine}, APIS, GatewayMetrics(CollectorRegistry()))  # type: ignore[dict-item]
    runner = web.AppRunner(app, shutdown_timeout=0.5, **RUNNER_OPTIONS)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        await app[STATE].models_loaded.wait()
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            yield session, app[STATE], engine
    finally:
        await runner.cleanup()


def _metrics() -> str:
    """List name, type, labels and help text of every metric."""
    model = ModelMetrics(CollectorRegistry())
    model.registry.register(DeliveryCollector(DeliveryCounts(), StreamTable(asyncio.Event())))
    vllm = CollectorRegistry()
    vllm.register(VllmNames(model.registry, "tiny"))
    registries = {
        "gateway": GatewayMetrics(CollectorRegistry()).registry,
        "model at the gateway": model.registry,
        "vLLM names at the gateway": vllm,
        "worker": LoadedWorker().metrics.registry,
        "batch driver": _driver_registry(),
    }
    lines = []
    for name, registry in registries.items():
        lines.append(f"## {name}")
        for family in sorted(registry.collect(), key=lambda family: family.name):
            labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
            names = getattr(registry._names_to_collectors.get(family.name), "_labelnames", ()) or labels
            lines.append(f"{family.name} {family.type} ({', '.join(names)}): {family.documentation}")
        lines.append("")
    return "\n".join(lines)


def _driver_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    DriverMetrics(registry)
    return registry


def _configuration(program: str) -> str:
    """Return the output of `--show-config` with default settings."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        load_settings(PROGRAMS[program], ["--show-config"], {}, prog=f"pagestream {program}")
    return f"## {program}\n{shown.getvalue()}"
