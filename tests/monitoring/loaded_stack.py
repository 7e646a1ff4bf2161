"""A gateway, a batch driver, a worker and their store as processes, under a load that produces every counted event.

The load has samples, beams, swaps (few device blocks, free host blocks), prefix hits, refusals, failed requests, a
batch and disconnecting clients.
"""

import http.client
import itertools
import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from bench.serving.free_port import free_port
from tests.conftest import Valkey
from tests.e2e.batch_load import batch_lines
from tests.e2e.fleet import START_SECONDS, Fleet, running_fleet
from tests.patience import PATIENCE_SECONDS
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

MODEL = "tiny"
NUM_BLOCKS, NUM_HOST_BLOCKS = 73, 257  # one longest request fits, with little room beside it
FAILING_TOKEN = 300
MAX_MODEL_LEN = 256
NUM_CLIENTS, MAX_STREAMS = 10, "9"  # one request is refused now and then
NUM_LINES = 4
SCRIPT = str(Path(__file__).parents[1] / "e2e" / "scripted_worker.py")

KINDS: list[dict[str, Any]] = [
    {"prompt": "the capital of France is Paris, the end", "max_tokens": 60, "ignore_eos": True},
    {"prompt": "the user", "max_tokens": 50, "n": 3, "temperature": 1, "ignore_eos": True},
    {"prompt": "the assistant", "max_tokens": 30, "use_beam_search": True, "n": 2, "temperature": 0},
    {"prompt": "the assistant and the user", "max_tokens": 40, "ignore_eos": True, "stream": True},
    {"prompt": "the end", "max_tokens": 200, "stream": True, "ignore_eos": True, "leave": True},
    {"prompt": [5, FAILING_TOKEN, 6], "max_tokens": 5},
    {"prompt": "the end", "temperature": -1},
]


class LoadedStack:
    def __init__(self, fleet: Fleet, worker_port: int, driver_port: int) -> None:
        self.ports = {"gateway": fleet.port, "engine_worker": worker_port, "batches": driver_port}
        self._stopping = threading.Event()
        self._clients = [
            threading.Thread(target=self._ask_until_stopped, args=(number,)) for number in range(NUM_CLIENTS)
        ]

    def get(self, program: str, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[program]}{path}", timeout=PATIENCE_SECONDS) as reply:
            return bytes(reply.read())

    def is_ready(self) -> bool:
        try:
            return bool(json.loads(self.get("gateway", "/ready"))["state"] == "ready")
        except OSError:
            return False

    def start_load(self) -> None:
        self._begin_batch()
        for client in self._clients:
            client.start()

    def stop_load(self) -> None:
        self._stopping.set()
        for client in self._clients:
            client.join()

    def _begin_batch(self) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{self.ports['gateway']}/v1", api_key="none") as client:
            lines = "\n".join(batch_lines(NUM_LINES)).encode()
            file = client.files.create(file=("in.jsonl", lines), purpose="batch")
            client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

    def _ask_until_stopped(self, number: int) -> None:
        source = random.Random(number)
        for kind in itertools.cycle(KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]):
            if self._stopping.is_set():
                return
            self._ask({**kind, "model": MODEL, "seed": source.randrange(1000)})

    def _ask(self, body: dict[str, Any]) -> None:
        leaves = body.pop("leave", False)
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["gateway"], timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read(300 if leaves else None)
        finally:
            connection.close()


@contextmanager
def loaded_stack(directory: Path, valkey: Valkey) -> Iterator[LoadedStack]:
    """Yield a running stack; its load has started and continues until the context exits."""
    worker_port, driver_port = free_port(), free_port()
    common = ["--model", str(write_tiny_model(directory / MODEL, MAX_MODEL_LEN)), "--served-model-name", MODEL]
    common += ["--redis-url", valkey.url]
    script = ["--script-num-blocks", str(NUM_BLOCKS), "--script-num-host-blocks", str(NUM_HOST_BLOCKS)]
    script += ["--script-vocab-size", str(VOCAB_SIZE), "--script-failing-token", str(FAILING_TOKEN)]
    script += ["--script-step-seconds", "0.001"]
    with running_fleet(directory / "logs") as fleet:
        stack = LoadedStack(fleet, worker_port, driver_port)
        fleet.start("worker", SCRIPT, *script, *common, "--metrics-port", str(worker_port), PYTHONPATH=".")
        common += ["--files-dir", str(directory / "files")]
        fleet.start("gateway", "-m", "gateway", *common, "--port", str(fleet.port), "--max-num-streams", MAX_STREAMS)
        fleet.start("driver", "-m", "gateway.batches.driver", *common, "--metrics-port", str(driver_port))
        deadline = time.monotonic() + START_SECONDS
        while not stack.is_ready():
            assert time.monotonic() < deadline and not fleet.has_lost_one(), fleet.all_logs()
            time.sleep(0.05)  # polls other processes
        stack.start_load()
        try:
            yield stack
        finally:
            stack.stop_load()
            assert not fleet.has_lost_one(), fleet.all_logs()
