"""Measure the scheduler's cost on the host: no device, no model, one thread.

    step        schedule() + apply() with every sequence decoding, microseconds; with and without the prefix cache, one
                step ahead, as on CUDA, and with seven groups of layers, as Gemma 3
    hashing     block hashes of a long prompt, nanoseconds per token
    cached      admission of a new prompt that evicts, and of one that hits, with 10^3 to 10^6 cached blocks

Each figure is the minimum of several repeats, because other processes only add time, beside the median.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.prefix_cache import extend_digests
from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.batch import StepResult
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.messages import SamplingParams

BLOCK_SIZE = 16
PROMPT_TOKENS = 1024
NUM_STEPS = 256  # 16 block boundaries per sequence
SEVEN_GROUPS = (512, 512, 512, 512, 512, 512, 0)
TARGETS = {"step_microseconds": 1_000.0, "hashing_nanoseconds_a_token": 100.0}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench scheduler-cost", description=__doc__.split("\n")[0])
    parser.add_argument("--num-sequences", metavar="N", type=int, default=256)
    parser.add_argument("--cached-blocks", metavar="FLAGS", type=lambda text: [int(part) for part in text.split(",")],
                        default=[10**3, 10**4, 10**5, 10**6], help="cached blocks, comma separated")  # fmt: skip
    parser.add_argument("--repeats", metavar="N", type=int, default=5)
    parser.add_argument("--output", metavar="PATH", type=Path, help="file to write the JSON to")
    options = parser.parse_args(argv)
    result: dict[str, Any] = {
        "command": " ".join(["python -m bench scheduler-cost", *argv]),
        "python": platform.python_version(),
        "processor": _processor(),
        "targets": TARGETS,
        "num_sequences": options.num_sequences,
        "step_microseconds": {
            "prefix_cache": step_microseconds(options.num_sequences, options.repeats),
            "no_prefix_cache": step_microseconds(options.num_sequences, options.repeats, enable_prefix_caching=False),
            "one_ahead": step_microseconds(options.num_sequences, options.repeats, one_ahead=True),
            "seven_groups": step_microseconds(options.num_sequences, options.repeats, windows=SEVEN_GROUPS),
        },
        "hashing_nanoseconds_a_token": hashing_nanoseconds(options.repeats),
        "admission_microseconds_a_block": {
            str(count): admission_microseconds(count, options.repeats) for count in options.cached_blocks
        },
    }
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def step_microseconds(
    num_sequences: int,
    repeats: int,
    *,
    enable_prefix_caching: bool = True,
    one_ahead: bool = False,
    windows: tuple[int, ...] = (0,),
) -> dict[str, float]:
    """Return minimum and median over decode steps, and the mean, which includes steps at block boundaries."""
    seconds = []
    means = []
    for _ in range(repeats):
        loop = _Loop(_decoding_scheduler(num_sequences, enable_prefix_caching, windows), one_ahead)
        steps = [_timed(loop.step) for _ in range(NUM_STEPS)]
        means.append(statistics.mean(steps))
        seconds += steps
    return {
        "least": round(min(seconds) * 1e6, 1),
        "median": round(statistics.median(seconds) * 1e6, 1),
        "least_mean": round(min(means) * 1e6, 1),
    }


def hashing_nanoseconds(repeats: int, num_tokens: int = 131_072) -> dict[str, float]:
    seconds = []
    for repeat in range(repeats):
        sequence = _sequence(f"h{repeat}", range(repeat, repeat + num_tokens), max_tokens=1)
        seconds.append(_timed(lambda sequence=sequence: extend_digests(sequence, num_tokens // BLOCK_SIZE, BLOCK_SIZE)))
    return _summary([value / num_tokens * 1e9 for value in seconds])


def admission_microseconds(num_cached_blocks: int, repeats: int) -> dict[str, dict[str, float]]:
    """Admit prompts of 64 blocks into a full, cached pool: each evicts 64 blocks, then comes again and hits."""
    num_blocks = PROMPT_TOKENS // BLOCK_SIZE
    manager = KVCacheManager(num_cached_blocks + 1, BLOCK_SIZE)
    for index in range(-(-num_cached_blocks // num_blocks)):
        _admit_and_free(manager, index)
    miss, hit = [], []
    for repeat in range(10 * repeats):
        miss.append(_timed(lambda repeat=repeat: _admit_and_free(manager, -1 - repeat)))
        hit.append(_timed(lambda repeat=repeat: _admit_and_free(manager, -1 - repeat)))
    return {
        name: _summary([value / num_blocks * 1e6 for value in values])
        for name, values in (("miss", miss), ("hit", hit))
    }


def _admit_and_free(manager: KVCacheManager, number: int) -> None:
    first = number * 10_000 % 2**31
    sequence = _sequence("a", range(first, first + PROMPT_TOKENS), max_tokens=1)
    assert manager.try_admit(sequence)
    manager.publish(sequence, PROMPT_TOKENS)
    manager.take_transfers()
    sequence.kv.num_computed_tokens = PROMPT_TOKENS
    manager.free(sequence)


def _decoding_scheduler(num_sequences: int, enable_prefix_caching: bool, windows: tuple[int, ...]) -> Scheduler:
    num_tokens = PROMPT_TOKENS + NUM_STEPS + 16
    config = SchedulerConfig(
        max_num_seqs=num_sequences, max_num_batched_tokens=num_sequences * PROMPT_TOKENS, max_model_len=num_tokens
    )
    manager = KVCacheManager(
        len(windows) * num_sequences * (num_tokens // BLOCK_SIZE + 2) + 1,
        BLOCK_SIZE,
        windows=windows,
        max_new_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    scheduler = Scheduler(config, manager)
    for index in range(num_sequences):
        first = index * 10_000 + index  # starts at all positions of a block
        prompt = range(first, first + PROMPT_TOKENS - index % BLOCK_SIZE)
        scheduler.add(_sequence(str(index), prompt, max_tokens=num_tokens))
    _Loop(scheduler, one_ahead=False).step()
    assert scheduler.num_running == num_sequences
    return scheduler


class _Loop:
    """Steps in sequence, or with each step scheduled before the previous one is applied."""

    def __init__(self, scheduler: Scheduler, one_ahead: bool) -> None:
        self._scheduler = scheduler
        self._in_flight = [scheduler.schedule()] if one_ahead else []

    def step(self) -> None:
        self._in_flight.append(self._scheduler.schedule())
        batch = self._in_flight.pop(0)
        self._scheduler.apply(batch, StepResult([[7] if scheduled.samples else None for scheduled in batch.sequences]))


def _sequence(request_id: str, token_ids: range, max_tokens: int) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    return Sequence(request_id=request_id, prompt_token_ids=list(token_ids), sampling=sampling)


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _summary(values: list[float]) -> dict[str, float]:
    return {"least": round(min(values), 3), "median": round(statistics.median(values), 3)}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
