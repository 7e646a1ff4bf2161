"""`serve` as a whole, except its children: real store, real processes, a fake gateway and fake workers."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench.serving.free_port import free_port
from gateway.batches.storage.quota import Quota
from gateway.batches.storage.storage import Storage
from shared.models_file import read_models
from tests.patience import PATIENCE_SECONDS

FAKE = Path(__file__).with_name("fake_children.py")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its guarantees are Linux's")


class Serve:
    """`pagestream serve` with fake children; its output is read line by line."""

    def __init__(self, directory: Path, *arguments: str, models_file: str = "") -> None:
        """Start it; in the text `models_file`, {model} stands for a model directory."""
        model = directory / "model"
        model.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json"):
            (model / name).touch()
        (directory / "models.toml").write_text(models_file.replace("{model}", str(model)))
        models = ["--models-file", str(directory / "models.toml")] if models_file else [str(model)]
        self.files_dir = directory / "files"
        self.port = free_port()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PAGESTREAM_")}
        environ |= {"PAGESTREAM_METRICS_PORT": "0"}  # ports next to a test's own one may be another test's
        environ |= {"XDG_STATE_HOME": str(directory / "state"), "XDG_CACHE_HOME": str(directory / "cache")}
        argv = [sys.executable, str(FAKE), "serve", *models, "--port", str(self.port), *arguments]
        argv += ["--files-dir", str(self.files_dir)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
        self.lines: list[str] = []

    def read_until(self, wanted: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if wanted in line:
                return line
        raise AssertionError(f"{wanted!r} never came:\n" + "\n".join(self.lines))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> list[list[str]]:
        """Return the workers' command lines."""
        return [child.cmdline() for child in self.children() if "fake-engine_worker" in child.cmdline()]

    def child(self, mark: str) -> psutil.Process:
        (found,) = [child for child in self.children() if any(mark in word for word in child.cmdline())]
        return found

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def serve() -> Iterator[Callable[..., Serve]]:
    running: list[Serve] = []
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:  # tmp_path is too long for a unix socket

        def start(*arguments: str, models_file: str = "") -> Serve:
            running.append(Serve(Path(directory), *arguments, models_file=models_file))
            return running[-1]

        yield start
        for one in running:
            one.close()


def gone(processes: list[psutil.Process]) -> bool:
    _ended, alive = psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)
    return alive == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_phases_and_banner_and_stops_in_order(serve: Callable[..., Serve], number: signal.Signals) -> None:
    one = serve("--workers", "2")
    one.read_until("Ready after")
    text = "\n".join(one.lines)
    assert text.index("store     started") < text.index("load") < text.index(f"http://127.0.0.1:{one.port}")
    children = one.children()
    assert len(children) == 4
    one.process.send_signal(number)
    assert one.process.wait(PATIENCE_SECONDS) == 0
    assert gone(children)


def test_second_signal_stops_without_waiting(serve: Callable[..., Serve]) -> None:
    one = serve("--fake-worker-stays", "yes", "--drain-seconds", "600")
    one.read_until("Ready after")
    children = one.children()
    one.process.send_signal(signal.SIGINT)
    one.read_until("stopping the gateway, then the workers")
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(PATIENCE_SECONDS) == 0  # the drain time alone would be ten times as long
    assert gone(children)


def test_killed_worker_is_replaced_with_a_new_id(serve: Callable[..., Serve]) -> None:
    one = serve()
    one.read_until("Ready after")
    worker = one.child("fake-engine_worker")
    first_id = worker.cmdline()[worker.cmdline().index("--worker-id") + 1]
    worker.kill()
    one.read_until("worker-0  died (signal 9); 0 requests requeued")
    second = one.read_until("fake worker").split()[-1]
    assert first_id.endswith(".0-0")
    assert second == first_id.removesuffix("-0") + "-1"


def test_killed_gateway_and_store_are_replaced(serve: Callable[..., Serve]) -> None:
    one = serve()
    one.read_until("Ready after")
    one.child("fake-gateway").kill()
    one.read_until("gateway   died (signal 9)")
    one.read_until("fake gateway")
    store, worker = one.child("valkey-server"), one.child("fake-engine_worker")
    store.kill()
    one.read_until("store     started again")
    assert one.child("valkey-server") != store
    assert one.child("fake-engine_worker") == worker


def test_gateways_share_the_port_and_are_replaced(serve: Callable[..., Serve]) -> None:
    one = serve("--gateways", "2")
    one.read_until("Ready after")  # one gateway listens
    while sum("fake gateway" in line for line in one.lines) < 2:
        one.read_until("fake gateway")
    gateways = [child for child in one.children() if "fake-gateway" in child.cmdline()]
    assert len(gateways) == 2
    gateways[0].kill()
    one.read_until("died (signal 9)")
    assert one.answers()
    one.read_until("fake gateway")
    assert gateways[1].is_running()


def test_gateway_killed_repeatedly_is_not_called_unstartable(serve: Callable[..., Serve]) -> None:
    one = serve()
    one.read_until("Ready after")
    for _ in range(2):
        one.child("fake-gateway").kill()
        one.read_until("gateway   died (signal 9)")
        one.read_until("fake gateway")
        assert one.answers()
        one.read_until("answered")  # the supervisor has received an answer from it
    assert one.process.poll() is None


def add_open_batch(files_dir: Path) -> None:
    storage = Storage(files_dir, Quota(2**20), 3600)
    (files_dir / "in").write_bytes(b"{}")
    storage.batches.create("", "/v1/completions", "file-" + "0" * 32, files_dir / "in", "24h", None)
    storage.close()


def test_batch_driver_starts_with_the_first_batch(serve: Callable[..., Serve]) -> None:
    one = serve()
    one.read_until("Ready after")
    assert len(one.children()) == 3
    add_open_batch(one.files_dir)
    one.read_until("fake batch driver")
    words = one.child("fake-gateway.batches.driver").cmdline()
    assert words[words.index("--files-dir") + 1] == str(one.files_dir)


def test_dying_batch_driver_ends_no_other_child(serve: Callable[..., Serve]) -> None:
    one = serve()
    add_open_batch(one.files_dir)
    one.read_until("fake batch driver")
    for _ in range(4):
        one.child("fake-gateway.batches.driver").kill()
        one.read_until("batches   died (signal 9)")
        one.read_until("fake batch driver")
    one.child("fake-gateway.batches.driver").kill()  # a fifth exit within a minute would end `serve` for other children
    one.read_until("batches   died (signal 9)")
    assert one.answers() and one.process.poll() is None
    one.process.terminate()
    assert one.process.wait(PATIENCE_SECONDS) == 0


TWO_MODELS = """
[[models]]
model = "{model}"
names = ["a", "alias"]
[[models]]
model = "{model}"
names = ["b"]
workers = 2
"""


def test_each_model_has_workers_and_the_gateway_lists_all(serve: Callable[..., Serve]) -> None:
    one = serve(models_file=TWO_MODELS)
    one.read_until("Ready after")
    assert "a, b, 1 gateway, 3 engine workers" in one.lines[0]
    while len(workers := one.workers()) < 3:
        time.sleep(0.01)  # one worker of each model makes `serve` ready; the third is still starting
    served = [words[words.index("--served-model-name") + 1] for words in sorted(workers, key=_number)]
    assert served == ["a", "b", "b"]
    words = one.child("fake-gateway").cmdline()
    resolved = Path(words[words.index("--models-file") + 1])
    assert [(entry.names, Path(entry.model).name) for entry in read_models(resolved)] == [
        (("a", "alias"), "model"), (("b",), "model"),
    ]  # fmt: skip
    next(child for child in one.children() if child.cmdline() == sorted(workers, key=_number)[2]).kill()
    one.read_until("worker-2  died (signal 9); 0 requests requeued")
    one.read_until("fake worker")
    one.process.terminate()
    assert one.process.wait(PATIENCE_SECONDS) == 0
    assert not resolved.exists()


def _number(words: list[str]) -> str:
    return words[words.index("--worker-id") + 1].split("-")[1]


def test_invalid_model_ends_the_start(serve: Callable[..., Serve]) -> None:
    one = serve(models_file='[[models]]\nmodel = "/nowhere"\n')
    one.read_until("pagestream serve: --model: /nowhere does not exist")
    assert one.process.wait(PATIENCE_SECONDS) == 1


def test_killed_supervisor_leaves_no_orphan(serve: Callable[..., Serve]) -> None:
    one = serve("--workers", "2")
    one.read_until("Ready after")
    children = one.children()
    one.process.kill()
    assert gone(children)


def test_unstartable_worker_ends_serve_with_its_last_lines(serve: Callable[..., Serve]) -> None:
    one = serve("--fake-worker-exit", "3")
    one.read_until("worker-0: not restarted: it exited twice with exit status 3 before it was ready. Its last lines:")
    assert one.read_until("fake worker").startswith("    fake worker serve.")
    assert one.process.wait(PATIENCE_SECONDS) == 1


def test_port_in_use_is_refused_before_anything_starts(serve: Callable[..., Serve]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        one = serve("--port", str(other.getsockname()[1]))
        one.read_until("is in use; choose another one with --port")
    assert one.process.wait(PATIENCE_SECONDS) == 1
    assert len(one.lines) == 1


def test_second_serve_uses_the_live_store_and_leaves_it(serve: Callable[..., Serve]) -> None:
    first, second = serve(), serve()
    first.read_until("Ready after")
    second.read_until("Ready after")
    stores = [one for one in (first, second) if any("store     started" in line for line in one.lines)]
    assert len(stores) == 1
    guest = second if stores == [first] else first
    guest.process.terminate()
    assert guest.process.wait(PATIENCE_SECONDS) == 0
    assert stores[0].child("valkey-server").is_running()


def test_unreachable_store_is_named_in_the_error(serve: Callable[..., Serve]) -> None:
    one = serve("--redis-url", "unix:///nowhere/valkey.sock")
    one.read_until("pagestream serve: --redis-url: the store at unix:///nowhere/valkey.sock does not answer")
    assert one.process.wait(PATIENCE_SECONDS) == 1
