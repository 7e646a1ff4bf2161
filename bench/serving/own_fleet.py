"""A benchmark's own store, gateways and worker, by default a scripted one without a model (scripted_worker.py)."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.serving.free_port import free_port
from pagestream.embedded_store import EmbeddedStore

MODEL = "m"
START_SECONDS = 240.0  # under a profiler a real worker needs minutes
STOP_SECONDS = 60.0
STORE_BYTES = 2**30
ROOT, DRIVER = Path(__file__).parents[2], "gateway/batches/driver/__main__.py"


class FleetSize(NamedTuple):
    gateways: int = 1
    workers: int = 1


@dataclass(frozen=True)
class OwnFleet:
    address: tuple[str, int]
    store_url: str
    # "gateway N", "worker" or "worker N", "store", and "batches" with a directory of files
    processes: dict[str, psutil.Process]
    directory: Path

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}"

    def cpu_seconds(self) -> dict[str, float]:
        return {name: _cpu_seconds(process) for name, process in self.processes.items()}


@asynccontextmanager
async def own_fleet(
    model: Path,
    worker_flags: Sequence[str],
    *,
    size: FleetSize = FleetSize(),  # noqa: B008 - immutable
    gateway_flags: Sequence[str] = (),
    worker: str = "bench.serving.scripted_worker",
    store_bytes: int = STORE_BYTES,
    gateway_home: Path | None = None,
    launcher: Sequence[str] = (),
) -> AsyncIterator[OwnFleet]:
    """Start the processes and yield when they are ready; all are gone afterwards.

    Args:
        model: Model directory; only its tokenizer is used by the scripted worker.
        worker_flags: Flags of the worker.
        size: Number of gateways and workers.
        gateway_flags: Flags of each gateway; with --files-dir there is a batch driver too.
        worker: Module that runs as the worker.
        store_bytes: Memory of the store.
        gateway_home: Another checkout for the gateways.
        launcher: Module that starts the gateways and the worker, and its first arguments.
    """
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        directory, port = Path(name), free_port()
        store = EmbeddedStore.at(directory, store_bytes)
        await store.start()
        assert store.process is not None, "a new directory must have its own store"
        common = ["--model", str(model), "--served-model-name", MODEL, "--redis-url", store.url]
        listen = ["--port", str(port), *(["--reuse-port"] if size.gateways > 1 else []), *gateway_flags]
        commands = {f"gateway {number}": [*launcher, "gateway", *common, *listen] for number in range(size.gateways)}
        if "--files-dir" in gateway_flags and ((gateway_home or ROOT) / DRIVER).exists():  # else the gateways drive
            commands["batches"] = [*launcher, "gateway.batches.driver", *common, *gateway_flags, "--metrics-port", "0"]
        of_worker = [*launcher, worker, *common, *worker_flags, "--metrics-port", "0"]
        names = ["worker"] if size.workers == 1 else [f"worker {number}" for number in range(size.workers)]
        commands |= dict.fromkeys(names, of_worker)
        try:
            with _running(commands, directory / "log", gateway_home) as processes:
                _wait_until_ready(port, directory / "log", size.workers, processes)
                processes["store"] = psutil.Process(store.process.process.pid)
                yield OwnFleet(("127.0.0.1", port), store.url, processes, directory)
        finally:
            await store.stop()


@contextmanager
def _running(
    commands: dict[str, list[str]], log_path: Path, gateway_home: Path | None
) -> Iterator[dict[str, psutil.Process]]:
    with log_path.open("wb") as log:
        running = {}
        for name, command in commands.items():
            home = None if name.startswith("worker") else gateway_home
            python = sys.executable if home is None else str(home.resolve() / ".venv/bin/python")
            _, _, number = name.partition("worker ")  # each of several workers has a GPU of its own, if there are any
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": number} if number else None
            running[name] = subprocess.Popen(
                [python, "-m", *command], stdout=log, stderr=subprocess.STDOUT, cwd=home, env=environment
            )
        try:
            yield {name: psutil.Process(process.pid) for name, process in running.items()}
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                _wait_or_kill(process)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process, and kill it if it does not react to a signal."""
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(port: int, log: Path, workers: int, processes: dict[str, psutil.Process]) -> None:
    until = time.monotonic() + START_SECONDS
    path = "readyz" if workers == 1 else "ready"  # readyz needs no key
    while time.monotonic() < until and all(process.status() != psutil.STATUS_ZOMBIE for process in processes.values()):
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as reply,
        ):
            if workers == 1 or len(json.load(reply)["workers"]) == workers:
                return
        time.sleep(0.1)
    raise RuntimeError("the fleet is not ready:\n" + log.read_text(errors="replace")[-2000:])


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
