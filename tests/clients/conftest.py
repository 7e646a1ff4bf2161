"""A gateway and a worker with SmolLM2 for real clients, which run in an environment of their own (`make dev`)."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Valkey
from tests.e2e.fleet import MODEL, Fleet, connected, running_fleet

PROGRAM_SECONDS = 300.0  # 10 on two idle cores, most of it imports
PROGRAMS = Path(__file__).parent / "programs"
CLIENTS = Path(sys.prefix) / "clients"
# No client may look for servers of its own; litellm would fetch its table of prices.
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Served:
    """`url` is the gateway's."""

    url: str
    fleet: Fleet

    def seen_by(self, program: str) -> Any:
        """What the client in programs/ saw of this server."""
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


@pytest.fixture(scope="module")
def served(valkey_server: Valkey, demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running_fleet(tmp_path_factory.mktemp("clients") / "logs") as fleet:
        common = ["--model", str(demo_model_dir), "--served-model-name", MODEL, "--redis-url", valkey_server.url]
        fleet.start("gateway", "-m", "gateway", *common, "--port", str(fleet.port))
        # Two clients ask twice and compare: float32, where a batch's size changes no token.
        options = ["--metrics-port", "0", "--kv-cache-memory-bytes", "512M", "--dtype", "float32"]
        # One thread: two that wait for each other crawl when a third process wants a core.
        options += ["--max-num-seqs", "16", "--num-threads", "1"]
        fleet.start("worker", "-m", "engine_worker", *common, *options)
        url = f"http://127.0.0.1:{fleet.port}"

        async def wait() -> None:
            async with connected(url) as api:
                await api.wait_until_ready(fleet)

        asyncio.run(wait())
        yield Served(url, fleet)
