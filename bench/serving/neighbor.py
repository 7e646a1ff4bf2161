"""python -m bench neighbor --model DIR: the effect of one API key's hostile clients on another key's polite clients.

Each pattern (hostile_patterns.py, share_patterns.py) gets its own fleet: store, gateway with two keys, and a scripted
worker with steps of 6 ms, so that gateway and store are measured. Polite chats stream at a steady rate, first alone,
then beside the hostile client. Reports time to first token, failed chats, gateway memory, and the longest /livez probe.
Exits with 1 if p99 of the first token exceeds --max-ratio times that alone, a token is missing, or a probe or the
memory exceeds its limit. In share_patterns.py the baseline is the same load of honest keys. The hostile client runs
with SCHED_IDLE, because a remote client would take no processor time; all other processes share the processors
equally. p99 of 240 chats is the third largest value. --programs DIR measures the gateway of another checkout with its
.venv. All patterns take 30 minutes.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import psutil

from bench.provenance import provenance
from bench.serving.hostile_client import Pattern
from bench.serving.hostile_patterns import PATTERNS
from bench.serving.load_report import tell
from bench.serving.own_fleet import MODEL, OwnFleet, own_fleet
from bench.serving.streaming_request import RequestResult, Target, send
from bench.statistics import distribution
from bench.workload import Workload

STEP_SECONDS = 0.006
PROBE_SECONDS = 0.02  # between two probes
CHAT_SECONDS = 60.0  # time limit of a chat
STORE_BYTES = 2**28  # the default of `pagestream serve`
WARM_UP_CHATS = 16
HOSTILE_BEGINS_SECONDS = 1.0  # before the first polite chat beside it
FILES = ["--max-files-bytes", "256M"]
NUM_HONEST_KEYS = 16
QUIET_SECONDS = 3.0  # pause after a client, in which its remaining requests end
MAX_GROWTH_BYTES = 64 * 2**20  # of the gateway from its start, --rest-seconds after a pattern


@dataclass
class Watched:
    """Gauges of the gateway while chats run."""

    livez_seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0


Phase: TypeAlias = tuple[tuple[list[RequestResult], Watched], dict[str, int]]  # chats, and the client's answers


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    result = {**provenance(["neighbor", *argv]), "patterns": asyncio.run(_measure_all(options))}
    tell(result, options.json)
    print(table(result["patterns"]))
    return 1 if any(one["misses"] for one in result["patterns"].values()) else 0


async def _measure_all(options: argparse.Namespace) -> dict[str, Any]:
    measured = {}
    for name in options.pattern or PATTERNS:
        measured[name] = await _measure(options, name)
        print(table({name: measured[name]}), measured[name]["misses"] or "passed", file=sys.stderr, flush=True)
    return measured


async def _measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    pattern = PATTERNS[name]
    honest = [f"honest{number}" for number in range(NUM_HONEST_KEYS if pattern.divides else 0)]
    keys = {key: secrets.token_hex(16) for key in ("polite", "hostile", *honest)}
    async with _fleet(options, keys, pattern) as fleet, _target(fleet, keys["polite"]) as target:
        await _chats(target, options, "warm-up", WARM_UP_CHATS)
        gateway = fleet.processes["gateway 0"]
        at_start = gateway.memory_info().rss
        phases: dict[str, Phase] = {"alone": (await _watched_chats(fleet, target, options), {})}
        if honest:
            phases["spread"] = await _chats_beside(options, name, fleet, target, [keys[key] for key in honest])
            await asyncio.sleep(QUIET_SECONDS)
        phases["beside"] = await _chats_beside(options, name, fleet, target, [keys["hostile"]])
        if honest:
            await asyncio.sleep(options.rest_seconds)
        growth = gateway.memory_info().rss - at_start
    return _figures(options, pattern, phases, growth)


async def _chats_beside(
    options: argparse.Namespace, name: str, fleet: OwnFleet, target: Target, keys: list[str]
) -> Phase:
    """Run chats beside a pattern. Also returns the number of answers of its client by status."""
    hostile = await _begin(options, name, fleet.url, keys)
    assert hostile.stdout is not None
    await hostile.stdout.readline()  # it has started, which takes seconds on a loaded machine
    await asyncio.sleep(HOSTILE_BEGINS_SECONDS)
    chats = await _watched_chats(fleet, target, options)
    answers, _ = await hostile.communicate()
    return chats, json.loads(answers or b"{}")


def _figures(
    options: argparse.Namespace,
    pattern: Pattern,
    phases: dict[str, Phase],
    growth_bytes: int,
) -> dict[str, Any]:
    figures: dict[str, Any] = {"hostile_answers": phases["beside"][1], "gateway_growth_bytes": growth_bytes}
    for name, ((results, watched), _) in phases.items():
        seconds = [one.time_to_first_token_seconds for one in results if not one.failure]
        figures[name] = {
            "chats": len(results),
            "first_token_seconds": distribution(seconds),
            "failures": sorted({one.failure for one in results if one.failure}),
            "num_failed": sum(bool(one.failure) for one in results),
            "num_503": sum("503" in one.failure for one in results),
            "livez_worst_seconds": max(watched.livez_seconds, default=None),
            "gateway_memory_bytes": watched.memory_bytes,
        }
    base = "spread" if pattern.divides else "alone"
    for quantile in ("p50", "p99"):
        seconds = [figures[name]["first_token_seconds"].get(quantile) for name in (base, "beside")]
        figures[f"{quantile}_ratio"] = seconds[1] / seconds[0] if all(seconds) else None
    figures["misses"] = misses_of(options, figures, max(options.max_livez_seconds, pattern.max_livez_seconds))
    return figures


def misses_of(options: argparse.Namespace, figures: dict[str, Any], max_livez_seconds: float) -> list[str]:
    ratio, beside = figures["p99_ratio"], figures["beside"]
    misses = {
        "the time to the first token": ratio is None or ratio > options.max_ratio,
        "tokens that did not come": beside["num_failed"] > 0 or figures["alone"]["num_failed"] > 0,
        "the gateway's memory": beside["gateway_memory_bytes"] > options.max_memory_bytes,
        "the gateway's memory afterwards": "spread" in figures and figures["gateway_growth_bytes"] > MAX_GROWTH_BYTES,
        "the wait for /livez": (beside["livez_worst_seconds"] or 0.0) > max_livez_seconds,
    }
    return [what for what, is_missed in misses.items() if is_missed]


@asynccontextmanager
async def _fleet(options: argparse.Namespace, keys: dict[str, str], pattern: Pattern) -> AsyncIterator[OwnFleet]:
    with tempfile.TemporaryDirectory(prefix="ps-neighbor-") as directory:
        keys_file = Path(directory) / "keys.toml"
        keys_file.write_text("\n".join(_entry(name, key, options, pattern) for name, key in keys.items()))
        flags = ["--api-keys-file", str(keys_file), "--files-dir", f"{directory}/files", *FILES]
        scripted = ["--step-seconds", str(STEP_SECONDS), "--max-model-len", "8192"]
        async with own_fleet(
            options.model.resolve(),
            [*([] if options.real else [*scripted, *pattern.worker_flags]), *options.worker_flags.split()],
            gateway_flags=[*flags, *options.gateway_flags.split()],
            worker="engine_worker" if options.real else "bench.serving.scripted_worker",
            store_bytes=STORE_BYTES,
            gateway_home=options.programs,
        ) as fleet:
            yield fleet


def _entry(name: str, key: str, options: argparse.Namespace, pattern: Pattern) -> str:
    max_concurrent = pattern.max_concurrent if pattern.divides else options.hostile_concurrent
    limits = [f"max_concurrent = {max_concurrent}"] if name == "hostile" and max_concurrent else []
    digest = hashlib.sha256(key.encode()).hexdigest()
    return "\n".join(["[[keys]]", f'name = "{name}"', f'sha256 = "{digest}"', *limits])


@asynccontextmanager
async def _target(fleet: OwnFleet, key: str) -> AsyncIterator[Target]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=CHAT_SECONDS),
        headers={"Authorization": f"Bearer {key}"},
    ) as session:
        yield Target(session=session, url=fleet.url, model=MODEL, chat=True)


async def _begin(options: argparse.Namespace, name: str, url: str, keys: list[str]) -> asyncio.subprocess.Process:
    seconds = options.hostile_seconds or HOSTILE_BEGINS_SECONDS + options.chats / options.rate + 2.0
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.serving.hostile_patterns", name, "--url", url,
        *(part for key in keys for part in ("--key", key)),
        "--seconds", str(seconds), "--turns", str(options.turns), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def _watched_chats(
    fleet: OwnFleet, target: Target, options: argparse.Namespace
) -> tuple[list[RequestResult], Watched]:
    watched = Watched()
    watching = [
        asyncio.create_task(_probe(fleet.url, watched)),
        asyncio.create_task(_weigh(fleet.processes["gateway 0"], watched)),
    ]
    try:
        return await _chats(target, options, "measured", options.chats), watched
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _chats(target: Target, options: argparse.Namespace, stream: str, count: int) -> list[RequestResult]:
    """Start each chat at its time, regardless of earlier ones."""
    lengths = [(options.prompt_words, options.output_tokens)] * count
    planned = Workload(lengths=lengths, token_ids=range(0), seed=1, chat=True).requests(options.rate, stream)
    begin = asyncio.get_running_loop().time()

    async def at_its_time(number: int, request: Any) -> RequestResult:
        await asyncio.sleep(begin + number / options.rate - asyncio.get_running_loop().time())
        return await send(target, request)

    return list(await asyncio.gather(*(at_its_time(*one) for one in enumerate(planned))))


async def _probe(url: str, watched: Watched) -> None:
    """Probe /livez as a kubelet does, but more often, and record the longest wait."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CHAT_SECONDS)) as session:
        while True:
            started = time.perf_counter()
            try:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await (await session.get(f"{url}/livez")).read()
            finally:  # also counts the probe that is open when the chats end
                watched.livez_seconds.append(time.perf_counter() - started)
            await asyncio.sleep(PROBE_SECONDS)


async def _weigh(gateway: psutil.Process, watched: Watched) -> None:
    while True:
        watched.memory_bytes = max(watched.memory_bytes, gateway.memory_info().rss)
        await asyncio.sleep(PROBE_SECONDS)


def table(patterns: dict[str, Any]) -> str:
    """Return one line per pattern, in milliseconds and megabytes."""
    lines = [["pattern", "TTFT p50/p99 base", "beside", "ratio", "failed", "livez base", "beside", "MB", "hostile"]]
    for name, figures in patterns.items():
        sides = [figures["spread" if "spread" in figures else "alone"], figures["beside"]]
        ratio = figures["p99_ratio"]
        lines.append([
            name,
            *(_milliseconds(side["first_token_seconds"], "p50", "p99") for side in sides),
            "-" if ratio is None else f"{ratio:.2f}",
            str(sides[1]["num_failed"]),
            *(_milliseconds(side, "livez_worst_seconds") for side in sides),
            f"{sides[1]['gateway_memory_bytes'] / 1e6:.0f}",
            " ".join(f"{count} x {status}" for status, count in sorted(figures["hostile_answers"].items())),
        ])  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _milliseconds(figures: dict[str, float], *names: str) -> str:
    return "/".join(f"{1e3 * figures[name]:.0f}" if figures.get(name) is not None else "-" for name in names)


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition(": ")[2]
    parser = argparse.ArgumentParser(prog="python -m bench neighbor", description=summary)
    parser.add_argument(
        "--model", type=Path, required=True, help="model directory; only its tokenizer is used without --real"
    )
    parser.add_argument("--real", action="store_true", help="use a worker with the model instead of a scripted one")
    parser.add_argument("--pattern", action="append", choices=PATTERNS, help="pattern to run, repeatable; default: all")
    parser.add_argument("--rate", type=float, default=16.0, help="polite chats per second (%(default)s)")
    parser.add_argument("--chats", type=int, default=240, help="number of polite chats in each phase (%(default)s)")
    parser.add_argument("--prompt-words", type=int, default=64, help="words of a prompt (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=32, help="tokens of an answer (%(default)s)")
    parser.add_argument("--turns", type=int, default=2_000, help="maximum of hostile turns (%(default)s)")
    parser.add_argument(
        "--hostile-seconds", type=float, help="time limit of the hostile client; default: that of the polite chats"
    )
    parser.add_argument(
        "--hostile-concurrent", type=int, default=16, help="max_concurrent of the hostile key (%(default)s)"
    )
    parser.add_argument(
        "--max-ratio", type=float, default=1.5, help="limit of the ratio of p99 to first token (%(default)s)"
    )
    parser.add_argument("--max-livez-seconds", type=float, default=0.05, help="limit of a probe (%(default)s)")
    parser.add_argument(
        "--max-memory-bytes", type=float, default=500e6, help="limit of the gateway's memory (%(default)s)"
    )
    parser.add_argument(
        "--rest-seconds", type=float, default=60.0, help="pause before memory is measured again (%(default)s)"
    )
    parser.add_argument("--programs", type=Path, help="checkout, with a .venv, whose gateway is measured")
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--gateway-flags", default="")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser
