"""Alerts beside real processes: none for a batch beside idle chat, one for each fault.

Prometheus scrapes in the interval of monitoring/prometheus/prometheus.yml.
"""

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml

from bench.serving.free_port import free_port
from tests.conftest import Valkey
from tests.e2e.batch_load import WORKER, begun, client_at
from tests.e2e.fleet import Answer, Api, Fleet, connected, running_fleet
from tests.monitoring.prometheus_server import RULES, Query, installed_program, running_prometheus
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

QUIET_SECONDS = 900.0
FIRE_SECONDS = 120.0  # from the fault to its alert
RESOLVE_SECONDS = 420.0  # the rate of refusals covers 5 minutes
MODEL = "tiny"
# 64 lines of 3 tokens run at once: 6 lines a second, so the batch outlasts the test.
NUM_LINES, STEP_SECONDS = 20_000, "0.5"
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@dataclass
class Site:
    """Two gateways, a batch driver and a worker."""

    fleet: Fleet
    directory: Path
    common: list[str]
    second_port: int
    api: Api

    def start_gateway(self, name: str, port: int) -> "subprocess.Popen[bytes]":
        flags = ["--port", str(port), "--max-num-streams", "8"]
        return self.fleet.start(name, "-m", "gateway", *self.common, *flags)


@asynccontextmanager
async def running_site(directory: Path, valkey: Valkey, worker_port: int, driver_port: int) -> AsyncIterator[Site]:
    common = ["--model", str(write_tiny_model(directory / MODEL)), "--served-model-name", MODEL]
    common += ["--redis-url", valkey.url, "--files-dir", str(directory / "files")]
    with running_fleet(directory / "logs") as fleet:
        async with connected(f"http://127.0.0.1:{fleet.port}", MODEL) as api:
            site = Site(fleet, directory, common, free_port(), api)
            site.start_gateway("first", fleet.port)
            site.start_gateway("second", site.second_port)
            fleet.start("driver", "-m", "gateway.batches.driver", *common, "--metrics-port", str(driver_port))
            script = ["--script-vocab-size", str(VOCAB_SIZE), "--script-step-seconds", STEP_SECONDS]
            fleet.start("worker", WORKER, *script, *common[:-2], "--metrics-port", str(worker_port), PYTHONPATH=".")
            await api.wait_until_ready(fleet)
            async with client_at(fleet.port) as client:
                await begun(client, NUM_LINES)
            yield site


async def test_batch_raises_no_alert_and_each_fault_raises_one(
    request: pytest.FixtureRequest, valkey_server: Valkey, tmp_path: Path
) -> None:
    worker_port, driver_port = free_port(), free_port()
    interval = yaml.safe_load((RULES / "prometheus.yml").read_text())["global"]["scrape_interval"]
    async with running_site(tmp_path, valkey_server, worker_port, driver_port) as site:
        gateways = [site.fleet.port, site.second_port]
        jobs = {"gateway": gateways, "engine_worker": [worker_port], "batches": [driver_port]}
        with running_prometheus(installed_program(request.config, "prometheus"), tmp_path, jobs, interval) as query:
            chat = asyncio.create_task(chat_now_and_then(site.api))
            await asyncio.sleep(QUIET_SECONDS)  # the time is the subject
            assert firing(query, f"{QUIET_SECONDS:.0f}s") == set()
            await stopped_worker_is_one_alert(site, query)
            await killed_gateway_is_one_alert(site, query)
            await refusals_are_one_alert(site, query)
            chat.cancel()


async def chat_now_and_then(api: Api) -> None:
    while True:
        await api.complete(Answer(), "the user", 5, ignore_eos=True)
        await asyncio.sleep(5)  # an idle service


async def stopped_worker_is_one_alert(site: Site, query: Query) -> None:
    worker = site.fleet.processes["worker"]
    worker.send_signal(signal.SIGSTOP)
    try:
        await only_alert(query, "PagestreamNoWorker")
    finally:
        worker.send_signal(signal.SIGCONT)
    await no_alert(query)


async def killed_gateway_is_one_alert(site: Site, query: Query) -> None:
    gateway = site.fleet.processes.pop("second")
    gateway.kill()
    gateway.wait()
    await only_alert(query, "PagestreamGatewayDown")
    site.start_gateway("second", site.second_port)
    await no_alert(query)


async def refusals_are_one_alert(site: Site, query: Query) -> None:
    """Send more streams than the gateway takes, until the alert fires."""
    ended = asyncio.Event()

    async def insist() -> None:
        async with aiohttp.ClientSession() as session:
            body = {"model": MODEL, "prompt": "the end", "max_tokens": 5, "ignore_eos": True, "stream": True}
            while not ended.is_set():
                async with session.post(f"{site.api.url}/v1/completions", json=body) as reply:
                    await reply.read()
                await asyncio.sleep(0.5)  # a client's pause before it tries again

    clients = [asyncio.create_task(insist()) for _ in range(32)]
    try:
        await only_alert(query, "PagestreamRefusals")
    finally:
        ended.set()
        await asyncio.gather(*clients)
    await no_alert(query)


async def only_alert(query: Query, name: str) -> None:
    """Wait until an alert fires, and check until its time has passed that no other does."""
    begun_at = time.monotonic()
    seen: dict[str, float] = {}
    while time.monotonic() < begun_at + FIRE_SECONDS:
        for alert in firing(query):
            seen.setdefault(alert, time.monotonic() - begun_at)
        await asyncio.sleep(1)  # polls Prometheus
    print(f"{name}: {seen}")
    assert seen.keys() == {name}


async def no_alert(query: Query) -> None:
    deadline = time.monotonic() + RESOLVE_SECONDS
    while remaining := firing(query):
        assert time.monotonic() < deadline, remaining
        await asyncio.sleep(1)  # polls Prometheus


def firing(query: Query, during: str = "3s") -> set[str]:
    """Return the names of alerts that fired, one per alert: two with other labels are listed with their number."""
    found = query(f'last_over_time(ALERTS{{alertstate="firing"}}[{during}])')
    names = [series["metric"]["alertname"] for series in found]
    return {name if names.count(name) == 1 else f"{names.count(name)} x {name}" for name in names}
