"""python -m bench key-shares --model DIR: the division of a busy worker among API keys.

Three keys with weights 1, 2, and 4 request more than 64 running slots at once for --seconds; the result is the share of
each in the tokens. Then one key alone, and two keys with equal weights, in tokens per second. The scripted worker has
steps of 6 ms. Exits with 1 if a share differs by more than 5 % from its weight's, or two keys have less than 0.95 of
the tokens of one.
"""

import argparse
import asyncio
import hashlib
import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.provenance import provenance
from bench.serving.load_report import tell
from bench.serving.own_fleet import MODEL, OwnFleet, own_fleet

WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0, "other": 1.0}
SLOTS, STEP_SECONDS = 64, 0.006
OUTPUT_TOKENS = 32
AT_ONCE = 96  # concurrent requests of a key, more than all slots
WARM_UP_SECONDS = 5.0
MAX_DIFFERENCE, MIN_RATIO = 0.05, 0.95


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench key-shares", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="model directory, for its tokenizer")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="SECONDS", help="duration of each load (%(default)s)"
    )
    parser.add_argument("--programs", type=Path, metavar="PATH", help="checkout, with a .venv, whose gateway runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for all figures")
    options = parser.parse_args(argv)
    result = asyncio.run(_measure(options))
    tell({**provenance(["key-shares", *argv]), **result}, options.json)
    is_divided = all(abs(ratio - 1) <= MAX_DIFFERENCE for ratio in result["part_over_weight"].values())
    return 0 if is_divided and result["two_over_one"] >= MIN_RATIO else 1


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    async with _fleet(options) as (fleet, keys):
        weighted = await _load(fleet, keys, ("one", "two", "four"), options.seconds)
        alone = await _load(fleet, keys, ("one",), options.seconds)
        two = await _load(fleet, keys, ("one", "other"), options.seconds)
    num_tokens, weights = weighted.total(), sum(WEIGHTS[name] for name in weighted)
    return {
        "tokens": dict(weighted),
        "part_over_weight": {name: count / num_tokens * weights / WEIGHTS[name] for name, count in weighted.items()},
        "alone_tokens_per_second": alone.total() / options.seconds,
        "two_tokens_per_second": {name: count / options.seconds for name, count in two.items()},
        "two_over_one": two.total() / alone.total(),
    }


@asynccontextmanager
async def _fleet(options: argparse.Namespace) -> AsyncIterator[tuple[OwnFleet, dict[str, str]]]:
    keys = {name: secrets.token_hex(16) for name in WEIGHTS}
    with tempfile.TemporaryDirectory(prefix="ps-shares-") as directory:
        path = Path(directory) / "keys.toml"
        entries = [_entry(name, key, has_weight=options.programs is None) for name, key in keys.items()]
        path.write_text("\n".join(entries))
        worker = ["--step-seconds", str(STEP_SECONDS), "--max-num-seqs", str(SLOTS)]
        gateway = ["--api-keys-file", str(path)]
        async with own_fleet(
            options.model.resolve(), worker, gateway_flags=gateway, gateway_home=options.programs
        ) as fleet:
            yield fleet, keys


def _entry(name: str, key: str, *, has_weight: bool) -> str:
    lines = ["[[keys]]", f'name = "{name}"', f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    return "\n".join([*lines, f"weight = {WEIGHTS[name]}"] if has_weight else lines)


async def _load(fleet: OwnFleet, keys: Mapping[str, str], names: tuple[str, ...], seconds: float) -> Counter[str]:
    """Return the tokens of each key within `seconds`, after a warm-up."""
    tokens, body = Counter[str](), {"model": MODEL, "prompt": "x", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    is_counted = asyncio.Event()

    async def ask(session: aiohttp.ClientSession, name: str) -> None:
        headers = {"Authorization": f"Bearer {keys[name]}"}
        while True:
            async with session.post(f"{fleet.url}/v1/completions", json=body, headers=headers) as answer:
                await answer.read()
                answer.raise_for_status()
            if is_counted.is_set():
                tokens[name] += OUTPUT_TOKENS

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(ask(session, name)) for name in names for _ in range(AT_ONCE)]
        await asyncio.sleep(WARM_UP_SECONDS)
        is_counted.set()
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        is_counted.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tokens
