"""The gateway as a process: start without store and model, errors at the start, and shutdown."""

import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from bench.serving.free_port import free_port
from gateway.process import Address, listen_at, new_event_loop
from tests.patience import PATIENCE_SECONDS

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes = []

    def start_gateway(*arguments: str, program: Sequence[str] = ("-m", "gateway")) -> "subprocess.Popen[str]":
        argv = [sys.executable, *program, "--redis-url", f"unix://{tmp_path}/no-store", *arguments]
        processes.append(subprocess.Popen(argv, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start_gateway
    for process in processes:
        process.kill()
        process.communicate()


def get(port: int, path: str) -> tuple[int, bytes]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_SECONDS) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:
            assert time.monotonic() < deadline, "the gateway does not listen"
            time.sleep(0.05)  # polls another process: there is no event to wait for


def test_gateway_listens_without_store_and_model(start: Start, tmp_path: Path) -> None:
    port = free_port()
    process = start("--model", str(tmp_path / "later"), "--port", str(port))
    assert get(port, "/livez")[0] == 200
    status, body = get(port, "/ready")
    assert (status, json.loads(body)["state"]) == (503, "starting")
    status, body = get(port, "/readyz")
    assert (status, json.loads(body)["store_write_seconds"]) == (503, None)
    assert b"\npagestream_redis_up 0.0\n" in get(port, "/metrics")[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_port_in_use_ends_the_start(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("--model", str(tmp_path), "--port", str(port))
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in errors


def test_gateways_share_a_port_and_have_one_of_their_own(start: Start, tmp_path: Path) -> None:
    port, own_ports = free_port(), [free_port(), free_port()]
    flags = ("--model", str(tmp_path), "--port", str(port), "--reuse-port", "--own-port")
    first, second = (start(*flags, str(own_port)) for own_port in own_ports)
    assert [get(own_port, "/livez")[0] for own_port in own_ports] == [200, 200]
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE_SECONDS) == 0
    assert get(port, "/livez")[0] == 200
    assert second.poll() is None


DRIVER = ("-m", "gateway.batches.driver")


def test_batch_driver_listens_without_store_and_model(start: Start, tmp_path: Path) -> None:
    config, port = tmp_path / "config.toml", free_port()
    config.write_text(f'[gateway]\nfiles_dir = "{tmp_path / "files"}"\nport = 1\n[batches]\nmetrics_port = {port}\n')
    process = start("--model", str(tmp_path / "later"), "--config", str(config), program=DRIVER)
    assert get(port, "/livez")[0] == 200
    assert get(port, "/readyz")[0] == 503
    assert b"\npagestream_gateway_batches 0.0\n" in get(port, "/metrics")[1]
    assert get(port, "/v1/models")[0] == 404
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_batch_driver_without_directory_ends_the_start(start: Start, tmp_path: Path) -> None:
    process = start("--model", str(tmp_path), program=DRIVER)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2 and "--files-dir: a value is required" in errors


def test_unservable_model_ends_the_start(start: Start, tiny_model_dir: Path) -> None:
    process = start("--model", str(tiny_model_dir), "--port", "0", "--max-model-len", "1M")
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "--max-model-len: expected at most 256, the model's positions; got 1048576" in errors


def test_models_with_equal_names_end_the_start(start: Start) -> None:
    process = start("--port", "0", "--model", "/m", "--served-model-name", "a", "a")
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2
    assert errors == "pagestream gateway: error: model name 'a': used twice; names and aliases must be unique\n"


def test_unknown_flag_ends_the_start(start: Start) -> None:
    process = start("--model", "/m", "--port", "x")
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2 and "--port" in errors


def test_gateway_runs_on_uvloop_if_installed() -> None:
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    with contextlib.closing(new_event_loop()) as loop:
        assert type(loop).__module__.partition(".")[0] == ("uvloop" if has_uvloop else "asyncio")


def test_gateway_without_uvloop_logs_it_and_answers(start: Start, tmp_path: Path) -> None:
    port = free_port()
    source = "import sys; sys.modules['uvloop'] = None; from gateway.__main__ import main; sys.exit(main(sys.argv[1:]))"
    process = start("--model", str(tmp_path / "later"), "--port", str(port), program=("-c", source))
    assert get(port, "/livez")[0] == 200
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "uvloop: not installed" in log


async def test_burst_of_connections_waits_for_the_loop() -> None:
    """1,000 clients connect while the event loop is busy; aiohttp's default backlog takes 128 of them."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    listener = await listen_at(runner, Address("127.0.0.1", 0), "m")
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(listener.address, timeout=0.5))
    await listener.close()
    await runner.cleanup()
