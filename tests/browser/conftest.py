"""Fixtures for browser tests: headless Chromium, a real gateway, store and worker. Only the model is a hash.

`stack.pace(seconds)` sets the duration of each worker step from now on.
"""

import json
import os
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from bench.serving.free_port import free_port
from tests.conftest import running_server
from tests.e2e.fleet import START_SECONDS, Fleet, running_fleet
from tests.patience import PATIENCE_SECONDS
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

MODEL, ALIAS = "tiny", "alias/of it"
NUM_BLOCKS = 4097  # 4,096 usable blocks and one padding block
NUM_HOST_BLOCKS = 513
BLOCK_SIZE = 16
QUICK_STEP_SECONDS = 0.01
SLOW_STEP_SECONDS = 0.25  # a block fills in 4 s, so a page that lags by 1 s can be compared
SCRIPT = str(Path(__file__).parents[1] / "e2e" / "scripted_worker.py")
MAX_MODEL_LEN = 2048


class Stack:
    """Run a gateway and a worker; give tests access to their state and step pace."""

    def __init__(self, fleet: Fleet, metrics_port: int, pace_file: Path) -> None:
        self.url = f"http://127.0.0.1:{fleet.port}"
        self._worker_url = f"http://127.0.0.1:{metrics_port}"
        self._pace_file = pace_file

    def pace(self, step_seconds: float) -> None:
        written = self._pace_file.with_suffix(".new")
        written.write_text(str(step_seconds))
        written.replace(self._pace_file)  # atomic rename: the worker may read the file at any time

    def kv(self) -> dict[str, Any]:
        return self._get(f"{self._worker_url}/debug/kv")

    def is_ready(self) -> bool:
        try:
            return str(self._get(f"{self.url}/ready")["state"]) == "ready"
        except OSError:
            return False

    def _get(self, url: str) -> dict[str, Any]:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
            content: dict[str, Any] = json.load(reply)
        return content


def eventually(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until `condition` holds. Other processes change the state, so polling is the only way."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the condition was never met"
        time.sleep(0.05)


@contextmanager
def running_stack(directory: Path, config: pytest.Config, num_blocks: int, num_host_blocks: int) -> Iterator[Stack]:
    """Run a stack on its own store.

    It outlives the tests of this folder, and its worker would take requests from other tests.
    """
    model = str(write_tiny_model(directory / MODEL, MAX_MODEL_LEN))
    metrics_port = free_port()
    with running_server(config, ["--port", "0"]) as valkey, running_fleet(directory / "logs") as fleet:
        common = ["--model", model, "--served-model-name", MODEL, ALIAS, "--redis-url", valkey.url]
        stack = Stack(fleet, metrics_port, directory / "pace")
        stack.pace(QUICK_STEP_SECONDS)
        script = ["--script-pace-file", str(directory / "pace"), "--script-vocab-size", str(VOCAB_SIZE)]
        script += ["--script-ignore-eos", "--script-block-size", str(BLOCK_SIZE)]
        script += ["--script-num-blocks", str(num_blocks), "--script-num-host-blocks", str(num_host_blocks)]
        fleet.start("worker", SCRIPT, *script, *common, "--metrics-port", str(metrics_port), PYTHONPATH=".")
        fleet.start("gateway", "-m", "gateway", *common, "--port", str(fleet.port))
        try:
            eventually(stack.is_ready, START_SECONDS)
        except AssertionError:
            pytest.fail(fleet.all_logs())
        yield stack


@pytest.fixture(scope="session")
def stack_processes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("browser"), request.config, NUM_BLOCKS, NUM_HOST_BLOCKS) as stack:
        yield stack


@pytest.fixture
def stack(stack_processes: Stack) -> Stack:
    """Return the shared stack at a quick pace, without requests."""
    stack_processes.pace(QUICK_STEP_SECONDS)
    eventually(lambda: not stack_processes.kv()["sequences"])
    return stack_processes


@pytest.fixture(scope="module")  # close now: while Playwright is open, no other test can run an event loop
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        missing = "no Chromium on this machine: apt-get install chromium"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work as root. Background network features are off: the tests need none.
        arguments = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, stack: Stack, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Open the page and fail the test if the console logs an error. The parameter is the color scheme."""
    context = browser.new_context(
        color_scheme=getattr(request, "param", "light"),
        viewport={"width": 1280, "height": 1400},
        permissions=["clipboard-read", "clipboard-write"],
    )
    page = context.new_page()
    errors: list[str] = []

    def on_message(message: ConsoleMessage) -> None:
        # Some tests cause refused requests on purpose; Chromium logs each one regardless of the page's code.
        refused = message.location["url"].endswith(("/v1/chat/completions", "/v1/models"))
        if message.type == "error" and not refused:
            errors.append(message.text)

    page.on("console", on_message)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(stack.url)
    yield page
    context.close()
    assert errors == []
