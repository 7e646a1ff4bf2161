"""Run a gateway and a worker with SmolLM2 for real API clients.

The OpenAI client runs inside the tests, the others in their own environment (`make dev`).
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.serving.free_port import free_port
from tests.conftest import Valkey
from tests.e2e.fleet import MODEL, Fleet, connected, running_fleet

PROGRAM_SECONDS = 300.0  # 10 s on two idle cores, most of it imports
PROGRAMS = Path(__file__).parent / "programs"
CLIENTS = Path(sys.prefix) / "clients"
# Keep clients off the network: litellm would download its price table.
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Served:
    """A running server; `url` is the gateway's."""

    url: str
    fleet: Fleet
    metrics_port: int  # the worker's metrics port
    common: list[str]  # flags shared by all processes

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @contextmanager
    def own_gateway(self, *flags: str) -> Iterator[tuple[openai.OpenAI, "subprocess.Popen[bytes]"]]:
        """Start a separate gateway in front of the shared worker; yield a client of it."""
        port = free_port()
        own = self.fleet.start("own", "-m", "gateway", *self.common, "--port", str(port), *flags)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", self.fleet)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
                yield client, own
        finally:
            own.kill()
            own.wait()
            del self.fleet.processes["own"]

    def seen_by(self, program: str) -> Any:
        """Run a client from programs/ against this server and return its JSON report."""
        return run_client(CLIENTS / "bin" / "python", program, self.url, MODEL)

    def seen_by_npm(self, program: str) -> Any:
        node = shutil.which("node")
        if node is None:
            pytest.skip("node is not installed")
        return run_client(Path(node), program, str(CLIENTS), self.url, MODEL)


def run_client(interpreter: Path, program: str, *arguments: str) -> Any:
    if not (CLIENTS / "bin" / "python").exists():
        pytest.fail("the clients' environment is not there: make dev")
    command = [str(interpreter), str(PROGRAMS / program), *arguments]
    environ = {**os.environ, **OFFLINE}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=PROGRAM_SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


class OneServer:
    """Start the server of this folder on first use, because pytest has no folder scope."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._served: Served | None = None

    def get(self, redis_url: str, model: Path, logs: Path) -> Served:
        if self._served is None:
            self._served = self._running.enter_context(running_server_of(redis_url, model, logs))
        return self._served

    def stop(self) -> None:
        self._served = None
        self._running.close()


ONE_SERVER = OneServer()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the server before other folders' tests, because they empty the store."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        ONE_SERVER.stop()


@pytest.fixture
def served(valkey_server: Valkey, demo_model_dir: Path, tmp_path: Path) -> Served:
    return ONE_SERVER.get(valkey_server.url, demo_model_dir, tmp_path / "logs")


@contextmanager
def running_server_of(redis_url: str, model: Path, logs: Path) -> Iterator[Served]:
    with running_fleet(logs) as fleet:
        common = ["--model", str(model), "--served-model-name", MODEL, "--redis-url", redis_url]
        fleet.start("gateway", "-m", "gateway", *common, "--port", str(fleet.port))
        # Two tests ask twice and compare. In float32 the batch size changes no token.
        metrics_port = free_port()
        options = ["--metrics-port", str(metrics_port), "--kv-cache-memory-bytes", "512M", "--dtype", "float32"]
        # One thread: two threads that wait for each other crawl when a third process wants a core.
        options += ["--max-num-seqs", "32", "--num-threads", "1"]
        fleet.start("worker", "-m", "engine_worker", *common, *options)
        url = f"http://127.0.0.1:{fleet.port}"
        wait_until_ready(url, fleet)
        yield Served(url, fleet, metrics_port, common)


def wait_until_ready(url: str, fleet: Fleet) -> None:
    async def wait() -> None:
        async with connected(url) as api:
            await api.wait_until_ready(fleet)

    asyncio.run(wait())
