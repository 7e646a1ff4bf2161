"""Print the files, functions and calls per token of one plain streamed chat.

    python -m bench request-profile --model DIR [--real]

Each process runs under sys.setprofile. Functions that also run while there is no request are left out. Calls per token
compare a long answer with a short one; they count each resumption of a coroutine.
"""

import argparse
import asyncio
import json
import tempfile
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from bench.serving.own_fleet import MODEL, OwnFleet, own_fleet
from bench.serving.profiled import LAST_PHASE

STARTING, IDLE, SHORT, LONG = range(4)
IDLE_SECONDS = 6.0  # longer than each period of the idle work
AFTER_SECONDS = 0.2  # for what follows the last byte of an answer
SHORT_TOKENS, LONG_TOKENS = 8, 72
NUM_PROCESSES = 2  # a gateway and a worker
WRITE_SECONDS = 60.0  # for their counts
SCRIPTED, REAL = "bench.serving.scripted_worker", "engine_worker"

Function = tuple[str, str]  # file, function


@dataclass(frozen=True)
class Profile:
    functions: set[Function]  # of a chat
    calls_per_token: dict[Function, float]  # those that run for each token

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def line(self, name: str) -> str:
        files = {file for file, _ in self.calls_per_token}
        calls = sum(self.calls_per_token.values())
        return f"{name:14}{len(self.files):7}{len(self.functions):11}{len(files):16}{calls:17.1f}"


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        phase_file = Path(directory) / "phase"
        phase_file.write_bytes(bytes((STARTING,)))
        asyncio.run(_run(options, phase_file))
        found = {path.stem.partition("-")[2]: _profile(path) for path in sorted(Path(directory).glob("phase-*.json"))}
    print(f"{'process':14}{'files':>7}{'functions':>11}{'files per token':>16}{'calls per token':>17}")
    for name, profile in found.items():
        print(profile.line(name.rpartition(".")[2]))
    for name, profile in found.items() if options.functions else ():
        for file, function in sorted(profile.functions):
            print(f"{name} {file} {function} {profile.calls_per_token.get((file, function), 0.0):.1f}")
    return 0


async def _run(options: argparse.Namespace, phase_file: Path) -> None:
    worker = REAL if options.real else SCRIPTED
    flags = [] if options.real else ["--step-seconds", "0.02"]
    launcher = ["bench.serving.profiled", str(phase_file)]
    async with own_fleet(options.model, flags, worker=worker, launcher=launcher) as fleet:
        _chat(fleet, SHORT_TOKENS)  # what is loaded on first use
        await asyncio.sleep(AFTER_SECONDS)
        _enter(phase_file, IDLE)
        await asyncio.sleep(IDLE_SECONDS)
        for phase, num_tokens in ((SHORT, SHORT_TOKENS), (LONG, LONG_TOKENS)):
            _enter(phase_file, phase)
            _chat(fleet, num_tokens)
            await asyncio.sleep(AFTER_SECONDS)
        _enter(phase_file, LAST_PHASE)
        async with asyncio.timeout(WRITE_SECONDS):
            while len(list(phase_file.parent.glob("phase-*.json"))) < NUM_PROCESSES:
                await asyncio.sleep(0.1)


def _enter(phase_file: Path, phase: int) -> None:
    with phase_file.open("r+b") as file:  # truncating a mapped file would kill its readers
        file.write(bytes((phase,)))


def _chat(fleet: OwnFleet, num_tokens: int) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three colors."}],
        "stream": True,
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    url, headers = f"{fleet.url}/v1/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as reply:
        reply.read()


def _profile(path: Path) -> Profile:
    calls: defaultdict[int, Counter[Function]] = defaultdict(Counter)
    for phase, file, function, num_calls in json.loads(path.read_text()):
        calls[phase][file, function] += num_calls
    functions = set(calls[SHORT]) - set(calls[IDLE])
    num_tokens = LONG_TOKENS - SHORT_TOKENS
    more = {function: (calls[LONG][function] - calls[SHORT][function]) / num_tokens for function in functions}
    return Profile(functions, {function: number for function, number in more.items() if number >= 0.5})


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench request-profile", description=summary)
    parser.add_argument("--model", metavar="PATH", type=Path, required=True, help="model directory")
    parser.add_argument(
        "--real", action="store_true", help="run the engine worker (default: a scripted one, without a model)"
    )
    parser.add_argument("--functions", action="store_true", help="also print each function with its calls per token")
    return parser
