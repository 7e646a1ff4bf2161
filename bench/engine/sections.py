"""The cases in which engines are compared; each is a function from a session to rows of figures.

    decode     time between tokens, with the whole batch decoding        prefill   time to the first token, alone
    trace      a length trace, all requests at once                      prefix    shared prefixes; unshared: without
    parallel   n = 4 against n = 1                                       beam      the best of four beams
    pressure   the trace with a small KV cache, and its preemptions      turns     the fifth turn of a chat

Prompts are seeded random token ids, no two runs share one, and every output has its full length.
"""

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.engine.session import EngineSession, Load, RunLog, step_figures
from engine_worker.engine import EngineStats
from shared.messages import SamplingParams

Rows = Iterator[dict[str, Any]]

DECODE_CASES = ((1, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (16, 16384))
PREFILL_TOKENS = (8192, 32768)
PREFILL_REPEATS = 4  # the first one is not counted
PREFIX_REQUESTS, PREFIX_TOKENS, OWN_TOKENS, PREFIX_OUTPUT_TOKENS = 500, 1024, 64, 64
TURNS, TURN_TOKENS, TURN_REPEATS = 5, 1638, 3  # 8,190 tokens in the last turn
PARALLEL_REQUESTS, PARALLEL_CHOICES = 100, 4
BEAM_WIDTH, BEAM_TOKENS = 4, 64


@dataclass(frozen=True)
class Bench:
    session: EngineSession
    lengths: list[tuple[int, int]]  # of the trace: prompt and output tokens
    token_ids: range
    repeats: int
    seed: random.Random

    def prompt(self, num_tokens: int) -> list[int]:
        return self.seed.choices(self.token_ids, k=num_tokens)

    def uniform(self, batch: int, prompt_tokens: int, output_tokens: int) -> Load:
        return [(self.prompt(prompt_tokens), sampling(output_tokens)) for _ in range(batch)]

    def warm_up(self) -> None:
        self.session.run(self.uniform(64, 64, 32))


def sampling(output_tokens: int, temperature: float = 0.0, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, seed=0, temperature=temperature, ignore_eos=True, n=n)


def decode(bench: Bench) -> Rows:
    for _ in range(bench.repeats):
        for batch, prompt_tokens in DECODE_CASES:
            output_tokens = 160 if batch * prompt_tokens >= 200_000 else 128
            log = bench.session.run(bench.uniform(batch, prompt_tokens, output_tokens))
            steps = log.steady_step_seconds(batch)
            figures = step_figures(steps) if steps else {}
            yield {"what": "decode_itl", "batch": batch, "prompt": prompt_tokens, **figures}


def prefill(bench: Bench) -> Rows:
    for num_tokens in PREFILL_TOKENS:
        times = [
            1e3 * bench.session.run(bench.uniform(1, num_tokens, 2)).seconds_to_first_token
            for _ in range(PREFILL_REPEATS)
        ]
        yield {
            "what": "prefill_ttft",
            "prompt": num_tokens,
            "ttft_ms": [round(time, 2) for time in times],
            "median_ms": round(statistics.median(times[1:]), 2),
        }


def trace(bench: Bench) -> Rows:
    for temperature in (*[0.0] * bench.repeats, 1.0):
        load = [(bench.prompt(prompt), sampling(output, temperature)) for prompt, output in bench.lengths]
        yield {"what": "throughput_trace", "temperature": temperature, **_throughput(load, bench.session.run(load))}


def prefix(bench: Bench) -> Rows:
    for _ in range(bench.repeats):
        common = bench.prompt(PREFIX_TOKENS)
        load = [(common + bench.prompt(OWN_TOKENS), sampling(PREFIX_OUTPUT_TOKENS)) for _ in range(PREFIX_REQUESTS)]
        yield {"what": "shared_prefix_1024+64->64", **_throughput(load, bench.session.run(load))}


def turns(bench: Bench) -> Rows:
    """Measure the last turn of a chat, with the turns before it cached and without."""
    for is_cached in (False, True):
        times = []
        for _ in range(TURN_REPEATS):
            chat = bench.prompt(TURNS * TURN_TOKENS)
            for turn in range(1 if is_cached else TURNS, TURNS + 1):
                log = bench.session.run([(chat[: turn * TURN_TOKENS], sampling(2))])
            times.append(round(1e3 * log.seconds_to_first_token, 2))
        name = f"turn_{TURNS}_ttft{'_cached' if is_cached else ''}"
        yield {"what": name, "prompt": TURNS * TURN_TOKENS, "ttft_ms": times}


def unshared(bench: Bench) -> Rows:
    load = bench.uniform(PREFIX_REQUESTS, PREFIX_TOKENS + OWN_TOKENS, PREFIX_OUTPUT_TOKENS)
    yield {"what": "no_shared_prefix_1088->64", **_throughput(load, bench.session.run(load))}


def parallel(bench: Bench) -> Rows:
    for n in (PARALLEL_CHOICES, 1):
        lengths = bench.lengths[:PARALLEL_REQUESTS]
        load = [(bench.prompt(prompt), sampling(output, temperature=1.0, n=n)) for prompt, output in lengths]
        yield {"what": f"parallel_n{n}_trace{PARALLEL_REQUESTS}", **_throughput(load, bench.session.run(load))}


def beam(bench: Bench) -> Rows:
    params = SamplingParams(
        max_tokens=BEAM_TOKENS,
        seed=0,
        temperature=0.0,
        ignore_eos=True,
        n=BEAM_WIDTH,
        use_beam_search=True,
        beam_width=BEAM_WIDTH,
    )
    load = [(bench.prompt(prompt), params) for prompt, _ in bench.lengths[:PARALLEL_REQUESTS]]
    log = bench.session.run(load)
    yield {"what": "beam4_trace100_64tok", **_throughput(load, log)}


def pressure(bench: Bench) -> Rows:
    for _ in range(bench.repeats):
        load = [(bench.prompt(prompt), sampling(output)) for prompt, output in bench.lengths]
        before = bench.session.stats()
        log = bench.session.run(load)
        yield {
            "what": "kv_pressure_trace",
            **_throughput(load, log),
            **_preemption_figures(before, bench.session.stats()),
            "steps": len(log.step_tokens),
            "mean_sequences_a_step": round(log.num_output_tokens / len(log.step_tokens), 1),
        }


SECTIONS: dict[str, Callable[[Bench], Rows]] = {
    "decode": decode,
    "prefill": prefill,
    "trace": trace,
    "prefix": prefix,
    "turns": turns,
    "unshared": unshared,
    "parallel": parallel,
    "beam": beam,
    "pressure": pressure,
}


def _preemption_figures(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """Count preempted sequences and recomputed tokens."""
    old, new = before.counters, after.counters
    computed, recomputed = new.computed_tokens - old.computed_tokens, new.recomputed_tokens - old.recomputed_tokens
    return {
        "preemptions": {mode: new.preemptions[mode] - old.preemptions[mode] for mode in new.preemptions},
        "computed_tokens": computed,
        "recomputed_tokens": recomputed,
        "recomputed_ratio": round(recomputed / computed, 5),
        "swapped_out_blocks": after.kv_totals.swapped_out_blocks - before.kv_totals.swapped_out_blocks,
        "swapped_in_blocks": after.kv_totals.swapped_in_blocks - before.kv_totals.swapped_in_blocks,
        "offloaded_blocks": after.kv_totals.offloaded_blocks - before.kv_totals.offloaded_blocks,
        "fetched_blocks": after.kv_totals.fetched_blocks - before.kv_totals.fetched_blocks,
    }


def _throughput(load: Load, log: RunLog) -> dict[str, Any]:
    num_prompt_tokens = sum(len(prompt) for prompt, _ in load)
    return {
        "s": round(log.seconds, 3),
        "requests": len(load),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": log.num_output_tokens,
        "req_s": round(len(load) / log.seconds, 2),
        "out_tok_s": round(log.num_output_tokens / log.seconds, 1),
    }
