"""make faults-group: kill ranks of groups at random moments, a hundred times, while streams run.

    python -m tests.faults.group_mix --rounds 100 [--ranks N] [--seed N] [--json FILE]

Each round kills one rank of one of two groups: while it loads, warms up, prefills, decodes or drains. Each stream must
get the tokens of an undisturbed run, once; nothing of the killed group and no request may be left. What a dead rank 0
held is requeued as `serve` does it. Prints each round and a report; exits with 1 if a promise was broken.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from bench.statistics import distribution
from gateway.store.inference_client import InferenceClient
from shared.reaping import reap_workers_with_prefix
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from tests.builders import make_prompt
from tests.e2e.fleet import running_fleet
from tests.e2e.reader import Reader
from tests.engine_worker.execution.reference import write_model_of_words
from tests.faults.conftest import Store, World
from tests.faults.group_site import FLAGS, Groups, outputs
from tests.faults.tcp_proxy import TcpProxy

MOMENTS = ("load", "warm-up", "prefill", "decode", "drain")
PHASES = {"load": ("import", "join", "load"), "warm-up": ("serve",)}  # phases of the follower that rank 0 waits for
LENGTHS = (3, 40, 200, 700)
MOST_TOKENS = 300
NUM_STREAMS = 4
MOST_DELAY_SECONDS = 0.2


@dataclass
class Report:
    rounds: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    streams: int = 0
    taken_over: int = 0
    wrong: list[str] = field(default_factory=list)
    silences_seconds: list[float] = field(default_factory=list)  # longest silence of each stream that was taken over
    other_silences_seconds: list[float] = field(default_factory=list)  # longest silence of each other stream
    gone_seconds: list[float] = field(default_factory=list)  # from each kill until no rank and no memory was left
    wills_gone_seconds: list[float] = field(default_factory=list)  # and until the exit reaper had ended
    loads: list[float] = field(default_factory=list)  # load of the machine at the end of each round

    def figures(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "killed": dict(self.killed),
            "streams": self.streams,
            "taken_over": self.taken_over,
            "wrong": self.wrong,
            "silence_of_taken_over_seconds": _summary(self.silences_seconds, over=2.0),
            "silence_of_others_seconds": _summary(self.other_silences_seconds, over=2.0),
            "gone_seconds": _summary(self.gone_seconds, over=1.0),
            "last_will_gone_seconds": _summary(self.wills_gone_seconds, over=1.0),
            "load_average": _summary(self.loads),
        }


def _summary(values: list[float], over: float | None = None) -> dict[str, float]:
    """Summarize values; with `over`, also how many are above it."""
    if not values:
        return {}
    figures = {name: round(value, 3) for name, value in distribution(values).items()}
    return figures if over is None else {**figures, f"over_{over:g}": sum(value > over for value in values)}


class Rounds:
    def __init__(self, world: World, groups: Groups, source: random.Random, report: Report) -> None:
        self._world, self._groups, self._random, self.report = world, groups, source, report
        self._names = (f"g{number}" for number in itertools.count())
        self._expected: dict[int, list[int]] = {}  # by prompt length

    async def begin(self) -> None:
        names = [self._start(), self._start()]
        await self._world.has_ready(*names)
        readers = [self._reader(length, MOST_TOKENS) for length in LENGTHS]
        self._expected = dict(zip(LENGTHS, await outputs(readers), strict=True))

    async def play(self) -> str:
        """Play a round; return which rank was killed when, and the tokens of the streams."""
        moment, rank = self._random.choice(MOMENTS), self._random.randrange(self._groups.size)
        killed = f"rank {rank}, {moment}"
        self.report.killed[killed] += 1
        lengths = self._random.choices(LENGTHS, k=NUM_STREAMS)
        readers = [self._reader(length, self._random.randrange(100, MOST_TOKENS)) for length in lengths]
        if moment in PHASES:
            await self._groups.kill_while(next(self._names), self._random.choice(PHASES[moment]), rank)
        else:
            await self._kill_the_holder(moment, rank, readers)
        num_taken_over, num_wrong = await self._compare(lengths, readers)
        await self._world.nothing_is_left()
        self.report.rounds += 1
        self.report.gone_seconds = self._groups.gone_seconds
        self.report.wills_gone_seconds = self._groups.wills_gone_seconds
        self.report.loads.append(os.getloadavg()[0])
        gone = f"gone after {1e3 * self._groups.gone_seconds[-1]:.0f} ms"
        silence = max(reader.longest_silence_seconds for reader in readers)
        equal = "each with the undisturbed tokens" if not num_wrong else f"{num_wrong} WITH OTHER TOKENS"
        streams = f"{NUM_STREAMS} streams, {num_taken_over} taken over, {equal}, silent for {silence:.2f} s at most"
        return f"{killed}, {gone}: {streams}"

    async def _kill_the_holder(self, moment: str, rank: int, readers: list[Reader]) -> None:
        world = self._world
        await world.all_have(readers if moment != "prefill" else readers[:1], 1)
        name = await self._groups.holder(readers[0])
        if moment == "drain":
            world.fleet.processes[name].send_signal(signal.SIGTERM)
            await world.logged(name, "draining")
        await asyncio.sleep(self._random.uniform(0.0, MOST_DELAY_SECONDS))  # interval between faults
        requeue = partial(reap_workers_with_prefix, world.connections.commands, world.keys, name)
        await self._groups.kill(name, rank, on_end=requeue)
        await world.has_ready(self._start())

    async def _compare(self, lengths: list[int], readers: list[Reader]) -> tuple[int, int]:
        """Return how many streams were taken over, and how many have other tokens than the undisturbed run."""
        report, found = self.report, await outputs(readers)
        attempts = await self._world.attempts(readers)
        wrong = [
            f"{length} tokens of prompt: {tokens}"
            for length, reader, tokens in zip(lengths, readers, found, strict=True)
            if tokens != self._expected[length][: reader.request.sampling.max_tokens]
        ]
        moved = [reader for reader, attempt in zip(readers, attempts, strict=True) if attempt > 1]
        report.streams += len(readers)
        report.taken_over += len(moved)
        report.wrong += wrong
        report.silences_seconds += [reader.longest_silence_seconds for reader in moved]
        stayed = [reader for reader, attempt in zip(readers, attempts, strict=True) if attempt == 1]
        report.other_silences_seconds += [reader.longest_silence_seconds for reader in stayed]
        return len(moved), len(wrong)

    def _start(self) -> str:
        self._groups.start(name := next(self._names))
        return name

    def _reader(self, length: int, max_tokens: int) -> Reader:
        prompt = [20 + token % 200 for token in make_prompt(length, first=7 * length)]
        return Reader(self._world.client, prompt, max_tokens=max_tokens)


@asynccontextmanager
async def running_world(directory: Path) -> AsyncIterator[World]:
    (directory / "store").mkdir()
    store = Store(directory / "store", append_fsync="everysec")
    store.start()
    keys = RedisKeys("m")
    try:
        async with TcpProxy("127.0.0.1", store.port) as proxy:
            with running_fleet(directory / "logs") as fleet:
                connections = connect(store.url)
                client = InferenceClient(connections, keys, "g0")
                await client.start()
                yield World(store, proxy, keys, client, connections, fleet)
                await client.close()
                await connections.aclose()
    finally:
        store.kill()


async def run_rounds(
    directory: Path, *, num_rounds: int, num_ranks: int, source: random.Random, report: Report
) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6 if num_ranks == 3 else 2, "num_hidden_layers": 2}
    (directory / "models").mkdir()
    model = write_model_of_words(directory / "models" / "tiny", **sizes)
    async with running_world(directory) as world:
        rounds = Rounds(world, Groups(world, model, [*FLAGS, "--tensor-parallel-size", str(num_ranks)]), source, report)
        try:
            await rounds.begin()
            for number in range(1, num_rounds + 1):
                started = time.monotonic()
                played = await rounds.play()
                print(f"round {number} of {num_rounds}, {time.monotonic() - started:.1f} s, {played}", flush=True)
        except BaseException:
            print(world.fleet.all_logs(), file=sys.stderr)
            raise


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.group_mix", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, choices=(2, 3), default=2, help="of each group")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    command = (
        f"python -m tests.faults.group_mix --rounds {options.rounds} --ranks {options.ranks} --seed {options.seed}"
    )
    started, source, report = time.monotonic(), random.Random(options.seed), Report()
    try:
        with tempfile.TemporaryDirectory(prefix="ps-groups-") as directory:
            asyncio.run(
                run_rounds(
                    Path(directory), num_rounds=options.rounds, num_ranks=options.ranks, source=source, report=report
                )
            )
    finally:
        shown = {
            "ranks": options.ranks,
            "seed": options.seed,
            **report.figures(),
            "took_seconds": round(time.monotonic() - started, 1),
        }
        print(json.dumps(shown, indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**provenance([]), "command": command, **shown}, indent=1) + "\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
