"""Gateways, workers and `pagestream serve` as real processes, and an HTTP client that reads their streams."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.serving.free_port import free_port

MODEL = "smollm2"
START_SECONDS = 180.0  # 5 s on two idle cores; the limit suits a busy CI machine
STOP_SECONDS = 100.0  # 1 s on two idle cores


class Fleet:
    """The processes of one test, and their logs."""

    def __init__(self, logs: Path) -> None:
        self.port = free_port()  # of the gateway
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = logs

    def start(self, name: str, *argv: str, **environ: str) -> "subprocess.Popen[bytes]":
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PAGESTREAM_")}
        with (self._logs / name).open("ab") as log:
            # Ports next to a test's own one may be another test's.
            variables = {**clean, "PAGESTREAM_METRICS_PORT": "0", **environ}
            process = subprocess.Popen([sys.executable, *argv], stdout=log, stderr=log, env=variables)
        self.processes[name] = process
        return process

    def has_lost_one(self) -> bool:
        return any(process.poll() is not None for process in self.processes.values())

    def log(self, name: str) -> str:
        return (self._logs / name).read_text(errors="replace")

    def all_logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{self.log(path.name)[-4000:]}" for path in sorted(self._logs.iterdir()))

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


@contextmanager
def running_fleet(logs: Path) -> Iterator[Fleet]:
    logs.mkdir(exist_ok=True)
    fleet = Fleet(logs)
    try:
        yield fleet
    finally:
        fleet.stop()


@dataclass
class Answer:
    """One stream as its client received it; `arrival_seconds[i]` belongs to `pieces[i]`."""

    pieces: list[str] = field(default_factory=list)
    arrival_seconds: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    completion_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reasons)

    def gaps_seconds(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrival_seconds, self.arrival_seconds[1:], strict=False)]

    def add(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            if choice["text"]:
                self.pieces.append(choice["text"])
                self.arrival_seconds.append(time.monotonic())
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])
        if chunk.get("usage"):
            self.completion_tokens = chunk["usage"]["completion_tokens"]


class Api:
    """The gateway at `url`, with its streaming routes."""

    def __init__(self, url: str, session: aiohttp.ClientSession, model: str) -> None:
        self.url = url
        self.model = model
        self._session = session

    async def wait_until_ready(self, fleet: Fleet, num_workers: int = 1) -> None:
        deadline, state = time.monotonic() + START_SECONDS, ""
        while time.monotonic() < deadline and all(process.poll() is None for process in fleet.processes.values()):
            try:
                async with self._session.get(f"{self.url}/ready") as reply:
                    state = await reply.text()
                    workers = json.loads(state).get("workers", [])
                    if reply.status == 200 and sum(worker["phase"] == "ready" for worker in workers) >= num_workers:
                        return
            except aiohttp.ClientConnectionError:
                pass  # the gateway does not listen yet
            await asyncio.sleep(0.1)  # polls other processes, which have no event to wait for
        raise AssertionError(f"not ready: {state}\n{fleet.all_logs()}")

    async def state(self, path: str) -> tuple[int, str]:
        """Return the status and body of a probe."""
        async with self._session.get(f"{self.url}{path}") as reply:
            return reply.status, json.loads(await reply.text())["state"]

    async def complete(self, answer: Answer, prompt: str | Sequence[int], max_tokens: int, **options: Any) -> Answer:
        """Stream a greedy completion into `answer`."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        body |= {"stream_options": {"include_usage": True}, **options}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    answer.add(json.loads(line[6:]))
        return answer

    async def complete_all(
        self, prompts: Sequence[str | Sequence[int]], max_tokens: int, **options: Any
    ) -> list[Answer]:
        return await asyncio.gather(*(self.complete(Answer(), prompt, max_tokens, **options) for prompt in prompts))


@asynccontextmanager
async def connected(url: str, model: str = MODEL, headers: Mapping[str, str] | None = None) -> AsyncIterator[Api]:
    connector = aiohttp.TCPConnector(limit=0)  # by default the 101st stream waits until another ends
    timeout = aiohttp.ClientTimeout(total=None)  # the test's own time limit ends it
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield Api(url, session, model)
