"""Two `pagestream serve` with one model name on one store: the second does not answer for the first."""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagestream.restart_policy import CANNOT_START
from tests.e2e.test_serve import MODEL, PARIS, START_SECONDS, Serve
from tests.faults.conftest import Store

NUM_REQUESTS = 100
FLAGS = ["--max-model-len", "256", "--quantization", "none"]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="that a worker ends with its `serve` is promised for Linux"),
]


@pytest.fixture
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:  # tmp_path is too long for a unix socket
        yield Path(directory)


@pytest.fixture
def running() -> Iterator[list[Serve]]:
    serves: list[Serve] = []
    yield serves
    for one in serves:
        one.close()


def test_second_serve_of_other_weights_refuses(
    demo_model_dir: Path, state: Path, running: list[Serve], tmp_path: Path
) -> None:
    running.append(first := Serve(state, *FLAGS))
    first.wait_for_line("Ready after")
    expected = "".join(first.chat(PARIS, max_tokens=4))
    namesake = tmp_path / MODEL
    namesake.mkdir()
    for path in demo_model_dir.glob("*.json"):
        shutil.copy(path, namesake)
    running.append(second := Serve(state, "--model", str(namesake), "--load-format", "dummy", *FLAGS))
    with ThreadPoolExecutor(16) as clients:
        answers = [clients.submit(lambda: "".join(first.chat(PARIS, max_tokens=4))) for _ in range(NUM_REQUESTS)]
        assert {answer.result() for answer in answers} == {expected}
    assert second.process.wait(START_SECONDS) == CANNOT_START
    second.wait_for_line("with weights ")
    assert sum("and this one has weights dummy:0" in line for line in second.lines) == 1
    assert not any("gateway" in line and "listening" in line for line in second.lines)


def test_serve_after_kill_changes_dtype_at_once(demo_model_dir: Path, state: Path, running: list[Serve]) -> None:
    """The store outlives both, so only `serve` itself can tell that its former workers died with it."""
    store_directory = state / "store-of-others"
    store_directory.mkdir()
    store = Store(store_directory)
    store.start()
    try:
        flags = ["--redis-url", store.url, *FLAGS]
        running.append(first := Serve(state, *flags))
        first.wait_for_line("Ready after")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        running.append(second := Serve(state, *flags, "--dtype", "bfloat16"))
        second.wait_for_line("Ready after")
        assert second.get("/ready")[0] == 200
    finally:
        store.kill()
