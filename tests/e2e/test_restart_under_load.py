"""kill -9 of the only worker under 30 requests per second: no request is refused, and every answer is complete."""

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.fleet import START_SECONDS, STOP_SECONDS, Answer, Api, connected, running_fleet
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(900)

MODEL = "tiny"
REQUESTS_PER_SECOND = 30
NUM_TOKENS = 12
PROMPTS = [[5 + number, 40, 41, 42 + number] for number in range(16)]
OPTIONS = {"ignore_eos": True}
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


class Load:
    """Sends streamed requests at an even rate, independent of the earlier ones."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._answers: list[tuple[int, Answer]] = []
        self._streams: list[asyncio.Task[Answer]] = []

    async def run(self) -> None:
        for number in itertools.count():
            which = number % len(PROMPTS)
            answer = Answer()
            self._answers.append((which, answer))
            stream = self._api.complete(answer, PROMPTS[which], NUM_TOKENS, **OPTIONS)
            self._streams.append(asyncio.create_task(stream))
            await asyncio.sleep(1 / REQUESTS_PER_SECOND)

    async def has_sent(self, count: int) -> None:
        while len(self._streams) < count:
            await asyncio.sleep(0.01)

    async def sends(self, count: int) -> None:
        await self.has_sent(len(self._streams) + count)

    async def check(self, expected: list[str]) -> None:
        ends = await asyncio.gather(*self._streams, return_exceptions=True)
        failed = [str(end)[:200] for end in ends if isinstance(end, BaseException)]
        assert not failed, f"{len(failed)} of {len(ends)} requests failed, the first with {failed[0]}"
        for which, answer in self._answers:
            assert answer.text == expected[which]
            assert (answer.finish_reasons, answer.completion_tokens) == (["length"], NUM_TOKENS)


@asynccontextmanager
async def load_of(api: Api) -> AsyncIterator[Load]:
    load = Load(api)
    running = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        running.cancel()


async def worker_of(serve: psutil.Process, before: psutil.Process | None = None) -> psutil.Process:
    """Return the supervisor's present worker, which differs from `before`."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            found = [child for child in serve.children() if is_worker(child) and child != before]
            if found:
                return found[0]
            await asyncio.sleep(0.01)


def is_worker(process: psutil.Process) -> bool:
    try:
        return "engine_worker" in process.cmdline()
    except psutil.Error:  # it has ended, or has not begun
        return False


async def test_killed_worker_refuses_no_request(tmp_path: Path) -> None:
    """The next worker is delayed until the gateway has missed the first one long enough to report no worker."""
    model = write_tiny_model(tmp_path / MODEL)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **SHAPE}))
    with running_fleet(tmp_path / "logs") as fleet:
        argv = ["--port", str(fleet.port), "--model", str(model), "--load-format", "dummy", "--dtype", "float32"]
        argv += ["--kv-cache-memory-bytes", "64M", "--num-threads", "1"]
        serve = fleet.start("serve", "-m", "pagestream", "serve", *argv, XDG_STATE_HOME=str(tmp_path))
        async with connected(f"http://127.0.0.1:{fleet.port}", MODEL) as api:
            await api.wait_until_ready(fleet)
            expected = [answer.text for answer in await api.complete_all(PROMPTS, NUM_TOKENS, **OPTIONS)]
            async with load_of(api) as load:
                await load.sends(60)
                first = await worker_of(psutil.Process(serve.pid))
                first.kill()
                second = await worker_of(psutil.Process(serve.pid), first)
                second.suspend()
                while (await api.state("/ready"))[1] != "waiting":
                    await load.sends(1)
                assert (await api.state("/readyz")) == (200, "waiting")
                await load.sends(60)
                second.resume()
                await api.wait_until_ready(fleet)
                await load.sends(30)
            await load.check(expected)
        serve.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(serve.wait, STOP_SECONDS) == 0
