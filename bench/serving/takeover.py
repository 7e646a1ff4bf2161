"""Count how often a stream's text changes when its worker is killed.

    python -m bench takeover --model DIR

Eight greedy streams run through its own `pagestream serve`. The worker is killed in the middle, and the restarted one
resumes from the journals. Texts are compared with an undisturbed round. They must be equal, except in bfloat16 on a
GPU, where generated KV is recomputed as a prompt by other kernels and a near-tie may be decided differently. The exit
status is 1 if a token is lost or duplicated, or if a text changes without --dtype bfloat16.
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.provenance import provenance
from bench.serving.own_server import ServerEnded, own_server
from pagestream.restart_policy import MAX_DEATHS, WINDOW_SECONDS

NAME = "takeover"
# One kill per round, at about the same position. `serve` gives up after too many deaths within a window.
SECONDS_PER_ROUND = WINDOW_SECONDS / (MAX_DEATHS - 1) + 5
OPENINGS = (
    "The capital of France is", "Once upon a time, in a village by the sea,", "Water boils at",
    "The three primary colors are", "In the year 1969,", "def fibonacci(n):",
    "The best thing about the mountains in winter is", "My grandmother's recipe begins with",
)  # fmt: skip


@dataclass(slots=True)
class Stream:
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    chars_at_kill: int = 0
    completion_tokens: int = 0

    @property
    def longest_silence_seconds(self) -> float:
        return max(b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False))


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    report = provenance(["takeover", *argv]) | {"rounds": []}
    flags = ["--dtype", options.dtype, "--quantization", options.quantization, "--max-model-len", "2048"]
    with own_server(options.model, NAME, flags) as server:
        for number in range(options.rounds):
            next_at = time.monotonic() + SECONDS_PER_ROUND
            report["rounds"].append(asyncio.run(_round(server.url, server.pid, number, options.output_tokens)))
            print(json.dumps(report["rounds"][-1]), flush=True)
            time.sleep(max(0.0, next_at - time.monotonic()))
    changed = sum(row["changed"] for row in report["rounds"])
    print(f"{' '.join(flags)}: {changed} of {len(OPENINGS) * options.rounds} texts changed after the kill")
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(options.dtype != "bfloat16" and changed > 0)


async def _round(url: str, supervisor: int, number: int, num_tokens: int) -> dict[str, Any]:
    prompts = [f"Chapter {number}. {opening}" for opening in OPENINGS]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=120)) as session:
        undisturbed = await _stream_all(session, url, prompts, num_tokens, kill=None)
        again = await _stream_all(session, url, prompts, num_tokens, kill=None)
        disturbed = await _stream_all(session, url, prompts, num_tokens, kill=supervisor)
    pairs = list(zip(undisturbed, disturbed, strict=True))
    return {
        "changed": sum(before.text != after.text for before, after in pairs),
        "changed_before_the_kill": sum(b.text[: a.chars_at_kill] != a.text[: a.chars_at_kill] for b, a in pairs),
        "changed_without_a_kill": sum(a.text != b.text for a, b in zip(undisturbed, again, strict=True)),
        "longest_silence_seconds": max(stream.longest_silence_seconds for stream in disturbed),
    }


async def _stream_all(
    session: aiohttp.ClientSession, url: str, prompts: list[str], num_tokens: int, kill: int | None
) -> list[Stream]:
    streams = [Stream() for _ in prompts]
    tasks = [
        asyncio.create_task(_read(session, url, prompt, num_tokens, stream))
        for prompt, stream in zip(prompts, streams, strict=True)
    ]
    if kill is not None:
        while min(len(stream.arrivals) for stream in streams) < num_tokens // 4:
            await asyncio.sleep(0.01)
        _kill_worker(kill)
        for stream in streams:
            stream.chars_at_kill = len(stream.text)
    await asyncio.gather(*tasks)
    if wrong := [stream.completion_tokens for stream in streams if stream.completion_tokens != num_tokens]:
        raise ServerEnded(f"streams have {wrong} tokens instead of {num_tokens}")
    return streams


async def _read(session: aiohttp.ClientSession, url: str, prompt: str, num_tokens: int, stream: Stream) -> None:
    body = {"model": NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/completions", json=body, raise_for_status=True) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ServerEnded(str(event["error"]))
            if event["choices"]:
                stream.text += event["choices"][0]["text"]
                stream.arrivals.append(time.perf_counter())
            if event.get("usage"):
                stream.completion_tokens = event["usage"]["completion_tokens"]


def _kill_worker(supervisor: int) -> None:
    children = psutil.Process(supervisor).children(recursive=True)
    (worker,) = [child for child in children if "engine_worker" in child.cmdline()]
    worker.kill()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench takeover", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", metavar="PATH", type=Path, required=True, help="model directory")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument(
        "--quantization", metavar="NAME", default="auto", help="weight format, as for a worker (default: %(default)s)"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=5)
    parser.add_argument("--output-tokens", metavar="N", type=int, default=96)
    parser.add_argument("--output", metavar="PATH", type=Path, help="JSON file")
    return parser
