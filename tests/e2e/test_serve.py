"""`pagestream serve` as a new user runs it: the demo model, a real answer, kills during an answer, no orphans.

The tests share one server, because a start takes seconds; after each fault it must be complete again.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from bench.serving.free_port import free_port
from shared.reaping import list_worker_ids
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from tests.e2e.fleet import connected
from tests.e2e.test_takeover import PROMPTS, kill_in_the_middle
from tests.idle_seconds import least_share, num_wakes
from tests.patience import PATIENCE_SECONDS

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper and his dog."}]
START_SECONDS = 180.0  # 8 s with cached weights; the limit suits a busy CI machine
STOP_SECONDS = 100.0
MODEL = "SmolLM2-135M-Instruct"
NUM_STORY_TOKENS = 60
MAX_WAKES_A_SECOND = 40  # 30 on an idle machine
NUM_PROMPT_TOKENS = 32  # per prompt; the only worker computes them all together

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(sys.platform != "linux", reason="that no orphan stays is promised for Linux"),
]


class Serve:
    """A running `pagestream serve`, its output lines, and a minimal client of its API."""

    def __init__(self, state: Path, *arguments: str) -> None:
        self.state = state
        self.port = free_port()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PAGESTREAM_")}
        environ["XDG_STATE_HOME"] = str(state)
        environ["PAGESTREAM_METRICS_PORT"] = "0"  # ports next to a test's own one may be another test's
        argv = [sys.executable, "-m", "pagestream", "serve", "--port", str(self.port), "--dtype", "float32", *arguments]
        # One thread, because two that spin for each other are slow when a third process needs a core.
        argv += ["--kv-cache-memory-bytes", "512M", "--num-threads", "1"]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
        self.lines: list[str] = []
        self._has_ended = False
        self._grew = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grew:
                self.lines.append(line.rstrip())
                self._grew.notify_all()
        with self._grew:
            self._has_ended = True
            self._grew.notify_all()

    def wait_for_line(self, wanted: str, seconds: float = START_SECONDS) -> None:
        with self._grew:
            self._grew.wait_for(lambda: self._has_ended or any(wanted in line for line in self.lines), seconds)
        assert any(wanted in line for line in self.lines), f"{wanted!r} did not come:\n" + "\n".join(self.lines)

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_SECONDS) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def chat(self, messages: list[dict[str, str]], **options: object) -> Iterator[str]:
        """Yield the pieces of a streamed answer; the last is its finish reason."""
        body = {"model": MODEL, "messages": messages, "temperature": 0, "stream": True, **options}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                choice = chunk["choices"][0]
                yield choice["delta"].get("content") or ""
                if choice["finish_reason"]:
                    yield f"<{choice['finish_reason']}>"

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def programs(self, module: str) -> list[psutil.Process]:
        """Return the children of `serve` that run `python -m MODULE`."""
        return [child for child in psutil.Process(self.process.pid).children() if module in child.cmdline()]

    def workers(self) -> list[psutil.Process]:
        return self.programs("engine_worker")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def started(demo_model_dir: Path) -> Iterator[list[Serve]]:
    """Yield the servers of this file, each with a directory; the last one runs unless a test has ended it."""
    serves: list[Serve] = []
    yield serves
    for one in serves:
        one.close()
        shutil.rmtree(one.state)


def begin(started: list[Serve]) -> Serve:
    started.append(Serve(Path(tempfile.mkdtemp(prefix="ps-"))))  # tmp_path is too long for a unix socket
    return started[-1]


@pytest.fixture
def serve(started: list[Serve]) -> Serve:
    """Return a ready server, whatever the test before has done."""
    one = started[-1] if started and started[-1].process.poll() is None else begin(started)
    one.wait_for_line("Ready after")
    while serve_phase(one) != "ready":
        time.sleep(0.1)  # polls other processes, which have no event to wait for
    return one


def worker_ids(state: Path) -> list[str]:
    """Return the ids of all workers in the store of a `serve`."""

    async def ask() -> list[str]:
        connections = connect(f"unix://{state}/pagestream/store/valkey.sock")
        try:
            return await list_worker_ids(connections.commands, RedisKeys(MODEL))
        finally:
            await connections.aclose()

    return asyncio.run(ask())


def gone(processes: list[psutil.Process]) -> bool:
    _ended, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS)
    return alive == []


def test_serve_starts_and_answers(started: list[Serve]) -> None:
    serve = begin(started)
    phases = [serve_phase(serve)]
    while phases[-1] != "ready":
        if (phase := serve_phase(serve)) != phases[-1]:
            phases.append(phase)
    order = ["", "starting", "download", "convert", "load", "allocate_kv", "warmup", "ready"]
    assert phases == sorted(phases, key=order.index)
    assert {"load", "ready"} <= set(phases)
    serve.wait_for_line("Ready after")
    assert any("on the CPU: expect" in line for line in serve.lines)
    assert "Paris" in "".join(serve.chat(PARIS))
    assert [model["id"] for model in serve.get("/v1/models")[1]["data"]] == [MODEL]
    # Store, gateway and worker; the gateway's processes for slow work are its own children.
    assert len(psutil.Process(serve.process.pid).children()) == 3


def serve_phase(serve: Serve) -> str:
    """Return the phase that /ready reports; empty before a gateway listens."""
    assert serve.process.poll() is None, "\n".join(serve.lines)
    try:
        return str(serve.get("/ready")[1]["phase"])
    except (ConnectionError, urllib.error.URLError):
        return ""


def story_with(serve: Serve, disaster: Callable[[], None]) -> list[str]:
    """Return the pieces of a stream during which `disaster` happens."""
    pieces = []
    for piece in serve.chat(STORY, max_tokens=NUM_STORY_TOKENS):
        pieces.append(piece)
        if len(pieces) == 12:
            disaster()
    return pieces


@cache
def undisturbed(serve: Serve) -> str:
    return "".join(serve.chat(STORY, max_tokens=NUM_STORY_TOKENS))


def test_idle_server_wakes_only_with_its_tick(serve: Serve) -> None:
    """Count wakes instead of CPU time, which depends on the machine's load: 30 per second for all processes."""
    pids = [serve.process.pid, *(child.pid for child in serve.family())]
    assert least_share(lambda: sum(map(num_wakes, pids)), MAX_WAKES_A_SECOND, window_seconds=5.0) <= MAX_WAKES_A_SECOND


async def test_killed_worker_loses_no_token_under_the_supervisor(serve: Serve) -> None:
    (worker,) = serve.workers()
    async with connected(f"http://127.0.0.1:{serve.port}", MODEL) as api:
        await kill_in_the_middle(api, worker.kill, NUM_PROMPT_TOKENS)
    serve.wait_for_line(f"worker-0  died (signal 9); {len(PROMPTS)} requests requeued")


def test_stopped_worker_is_requeued_at_once_and_serves_on_waking(serve: Serve) -> None:
    """The supervisor sees the stop and requeues before heartbeats are missed; the woken worker is fenced."""
    expected = undisturbed(serve)
    (worker,) = serve.workers()

    def stop_and_wake() -> None:
        worker.suspend()
        serve.wait_for_line("worker-0  is stopped by a signal; 1 requests requeued")
        worker.resume()

    pieces = story_with(serve, stop_and_wake)
    assert "".join(pieces) == expected and pieces[-1] == "<length>"
    assert serve.workers() == [worker]


def test_killed_store_keeps_accepted_requests(serve: Serve) -> None:
    expected = undisturbed(serve)
    (store,) = [child for child in serve.family() if "valkey" in child.name()]
    assert "".join(story_with(serve, store.kill)) == expected


NUM_BATCH_LINES = 32


def batch_lines() -> bytes:
    body = {"model": MODEL, "messages": PARIS, "max_tokens": 8, "temperature": 0}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return b"\n".join(json.dumps({"custom_id": str(number), **line}).encode() for number in range(NUM_BATCH_LINES))


def test_killed_batch_driver_ends_no_chat(serve: Serve) -> None:
    expected = undisturbed(serve)
    (gateway,) = serve.programs("gateway")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{serve.port}/v1", api_key="none") as client:
        uploaded = client.files.create(file=("in.jsonl", batch_lines()), purpose="batch")
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.request_counts is None or not batch.request_counts.completed:
            assert batch.status in ("validating", "in_progress")
            time.sleep(0.05)  # polls as a client does
            batch = client.batches.retrieve(batch.id)
        (driver,) = serve.programs("gateway.batches.driver")

        def kill_driver() -> None:
            assert client.batches.retrieve(batch.id).status == "in_progress"
            driver.kill()

        assert "".join(story_with(serve, kill_driver)) == expected
        assert serve.programs("gateway") == [gateway]
        serve.wait_for_line("batches   died (signal 9)")
        while batch.status != "completed":
            assert batch.status in ("in_progress", "finalizing")
            time.sleep(0.05)  # polls as a client does
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None and batch.error_file_id is None
        results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(result["custom_id"]) for result in results) == list(range(NUM_BATCH_LINES))
    assert {result["response"]["status_code"] for result in results} == {200}


def test_killed_supervisor_leaves_no_orphan_and_restarts(started: list[Serve], serve: Serve) -> None:
    family = serve.family()
    stream = serve.chat(STORY, max_tokens=200)
    next(stream)
    (first_fleet,) = {worker_id.split("-")[0] for worker_id in worker_ids(serve.state)}
    serve.process.kill()
    assert gone(family)
    with pytest.raises((ConnectionError, json.JSONDecodeError, urllib.error.URLError, StopIteration)):
        while True:
            next(stream)
    serve.close()
    again = started[-1] = Serve(serve.state)
    again.wait_for_line("Ready after")
    # Missed heartbeats would show only after 15 s that the first fleet is dead; the supervisor of a new store sees it
    # at once.
    assert not any(worker_id.startswith(first_fleet) for worker_id in worker_ids(again.state))
    assert "Paris" in "".join(again.chat(PARIS))


def test_orderly_stop_leaves_no_process(serve: Serve) -> None:
    family = serve.family()
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(STOP_SECONDS) == 0
    assert gone(family)
