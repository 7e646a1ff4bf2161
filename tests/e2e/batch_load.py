"""Batch lines, concurrent chats, and the expected results, for run-batch and /v1/batches."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from tests.builders import expected_output, make_request
from tests.e2e.fleet import Answer, Api, Fleet

NUM_LINES = 600
MAX_TOKENS = 3
WORKER = str(Path(__file__).with_name("scripted_worker.py"))
# Steps of 2 ms, so that the batch takes some seconds; a dead worker is missed after 3 s instead of 15.
WORKER_FLAGS = ["--script-step-seconds", "0.002", "--metrics-port", "0", "--dead-after-seconds", "3"]


def start_workers(fleet: Fleet, common: Iterable[str], *names: str) -> None:
    for name in names:
        fleet.start(name, WORKER, *common, "--worker-id", name, *WORKER_FLAGS, PYTHONPATH=".")


def start_driver(fleet: Fleet, name: str, *flags: str) -> None:
    """Start a batch driver; `flags` are those of its gateways."""
    fleet.start(name, "-m", "gateway.batches.driver", *flags, "--metrics-port", "0")


def prompt_of(number: int) -> list[int]:
    return [3 + number % 300, 3 + number // 300, 7]


def batch_lines(num_lines: int = NUM_LINES) -> Iterator[str]:
    for number in range(num_lines):
        body = {"model": "tiny", "prompt": prompt_of(number), "max_tokens": MAX_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        yield json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body})


def client_at(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")


async def begun(client: openai.AsyncOpenAI, num_lines: int = NUM_LINES) -> Batch:
    content = "\n".join(batch_lines(num_lines)).encode()
    uploaded = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")


def check_results(lines: str, num_lines: int = NUM_LINES) -> None:
    """Check that each line has exactly one correct result."""
    results: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines()]
    assert Counter(result["custom_id"] for result in results) == Counter(f"line-{n}" for n in range(num_lines))
    for result in results:
        assert result["response"]["status_code"] == 200, result
        (choice,) = result["response"]["body"]["choices"]
        prompt = prompt_of(int(result["custom_id"].removeprefix("line-")))
        request = make_request(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert choice["token_ids"] == expected_output(request, max_num_tokens=2048)


@asynccontextmanager
async def chats(api: Api, num_chats: int = 4) -> AsyncIterator[None]:
    """Run clients that send the next request after each answer; every answer must be complete."""
    ended = asyncio.Event()

    async def chat() -> int:
        num_answers = 0
        while not ended.is_set():
            answer = await api.complete(Answer(), prompt_of(num_answers), 8, ignore_eos=True)
            assert answer.completion_tokens == 8
            num_answers += 1
        return num_answers

    tasks = [asyncio.create_task(chat()) for _ in range(num_chats)]
    yield
    ended.set()
    assert min(await asyncio.gather(*tasks)) > 0
