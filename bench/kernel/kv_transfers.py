"""Measure KV transfers between device and host memory, and their effect on decoding.

    link        one large pinned copy each way: the machine's limit
    transfers   whole blocks through the engine's host pool, contiguous or scattered, one way and both at once
    decode      step time without transfers, and with the link busy each way; transfers are checked bit by bit
    crossover   time to first token of a prompt whose prefix is on the device, on the host, or nowhere
    pressure    the same requests with room for all and in a small KV cache, by preemption mode

Random weights suffice, because nothing depends on the results. Writes OUT/kv_transfers.json.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench.provenance import provenance
from engine_worker.engine import Engine
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.preemption import HostTierConfig, OffloadedPrefixes, PreemptionMode
from engine_worker.kv.transfers import BlockCopy, Moves, Transfers
from engine_worker.scheduling.batch import ScheduledBatch
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.messages import FinishEvent, GenerationRequest, SamplingParams, TokenEvent

LINK_BYTES = 2**30
TRANSFER_BLOCKS = 512
DECODE_CASES = ((16, 1024), (64, 1024))  # sequences, prompt tokens
DECODE_STEPS = 60
CROSSOVER_TOKENS = (64, 128, 192, 256, 512, 1024, 4096, 8192)
CROSSOVER_REPEATS = 5
MAX_NUM_SEQS = 96
PRESSURE_REQUESTS, PRESSURE_PROMPT, PRESSURE_OUTPUT = 96, 512, 192

Figures = dict[str, Any]


class SwappingExecutor:
    """The runner, with transfers added to each batch."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.moves = Moves()

    def submit(self, batch: ScheduledBatch) -> Any:
        if batch.sequences and self.moves:
            batch = replace(batch, transfers=Transfers(self.moves))
        return self._runner.submit(batch)


def make_engine(
    runner: ModelRunner,
    executor: Any = None,
    *,
    num_blocks: int | None = None,
    host: HostTierConfig | None = None,
    enable_prefix_caching: bool = True,
) -> Engine:
    """Make an engine; `num_blocks` defaults to all of the runner's."""
    manager = KVCacheManager(
        num_blocks or runner.num_blocks,
        runner.block_size,
        enable_prefix_caching=enable_prefix_caching,
        host_tier=host,
    )
    config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=8192, max_model_len=runner.max_model_len)
    return Engine(
        Scheduler(config, manager),
        executor or runner,
        eos_token_ids=(),
        vocab_size=runner.model_spec.vocab_size,
        clock=time.perf_counter,
        async_scheduling=runner.device_type == "cuda",
    )


def request(name: str, tokens: list[int], num_output_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=num_output_tokens, seed=0, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt_token_ids=tokens, sampling=sampling)


class Bench:
    def __init__(self, runner: ModelRunner, seed: int = 1) -> None:
        self._runner = runner
        self._kv_cache = runner.replica.kv_cache
        assert self._kv_cache.host is not None
        self._random = random.Random(seed)
        self._block_bytes = self._kv_cache.pool[0].nbytes
        self._is_cuda = self._kv_cache.pool.is_cuda

    def link(self) -> Figures:
        """Return GB/s of one large copy: to and from pinned memory on CUDA, within memory on a CPU."""
        host = torch.empty(LINK_BYTES // 4 if not self._is_cuda else LINK_BYTES, dtype=torch.uint8)
        host = host.pin_memory() if self._is_cuda else host
        device = torch.empty_like(host, device=self._kv_cache.pool.device)
        out = self._best_seconds(lambda: host.copy_(device, non_blocking=True))
        back = self._best_seconds(lambda: device.copy_(host, non_blocking=True))
        return {"out_gbps": host.nbytes / out / 1e9, "in_gbps": host.nbytes / back / 1e9}

    def transfers(self, link: Figures) -> Figures:
        figures: Figures = {}
        for name, scattered in (("contiguous", False), ("scattered", True)):
            copies = self._copies(scattered)
            back = _reversed(copies)
            figures[name] = {
                "out_gbps": self._gbps(Moves(swap_out=copies)),
                "in_gbps": self._gbps(Moves(swap_in=back)),
            }
            figures[name]["out_of_link"] = figures[name]["out_gbps"] / link["out_gbps"]
            figures[name]["in_of_link"] = figures[name]["in_gbps"] / link["in_gbps"]
        figures["host_microseconds_per_block"] = self._host_microseconds()
        return figures

    def decode(self, link: Figures) -> list[Figures]:
        return [self._decode(batch, prompt, link) for batch, prompt in DECODE_CASES]

    def crossover(self) -> list[Figures]:
        fitting = [num_tokens for num_tokens in CROSSOVER_TOKENS if num_tokens + 32 < self._runner.max_model_len]
        return [self._crossover(num_tokens) for num_tokens in fitting]

    def pressure(self) -> Figures:
        """Measure with room for all, and with blocks for a third of the requests' final tokens."""
        tokens = PRESSURE_REQUESTS * (PRESSURE_PROMPT + PRESSURE_OUTPUT)
        small = tokens // 3 // self._runner.block_size
        prompts = [self._prompt(PRESSURE_PROMPT) for _ in range(PRESSURE_REQUESTS)]
        host = HostTierConfig(num_blocks=self._runner.num_host_blocks, preemption_mode=PreemptionMode.SWAP)
        return {
            "roomy": self._pressure(prompts, self._runner.num_blocks, None),
            "swap": self._pressure(prompts, small, host),
            "recompute": self._pressure(prompts, small, None),
        }

    def _pressure(self, prompts: list[list[int]], num_blocks: int, host: HostTierConfig | None) -> Figures:
        engine = make_engine(self._runner, num_blocks=num_blocks, host=host)
        started = time.perf_counter()
        self._run(engine, [request(f"{index}", prompt, PRESSURE_OUTPUT) for index, prompt in enumerate(prompts)])
        seconds = time.perf_counter() - started
        counters = engine.stats().counters
        return {
            "requests_per_second": PRESSURE_REQUESTS / seconds,
            "preemptions": dict(counters.preemptions),
            "swapped_out_blocks": counters.swapped_out_blocks,
            "swapped_in_blocks": counters.swapped_in_blocks,
            "recomputed_ratio": counters.recomputed_tokens / counters.computed_tokens,
        }

    def _copies(self, scattered: bool) -> list[BlockCopy]:
        num_blocks = min(TRANSFER_BLOCKS, self._runner.num_host_blocks - 1, (self._runner.num_blocks - 1) // 2)
        first = self._runner.num_blocks - num_blocks  # the last ones; sequences get the first
        device = list(range(first, first + num_blocks))
        host = list(range(1, num_blocks + 1))
        if scattered:
            self._random.shuffle(device)
            self._random.shuffle(host)
        return [BlockCopy(*pair) for pair in zip(device, host, strict=True)]

    def _gbps(self, moves: Moves) -> float:
        num_bytes = (len(moves.swap_out) + len(moves.swap_in)) * self._block_bytes

        def transfer() -> None:
            self._kv_cache.apply_transfers(Transfers(moves))

        seconds = num_bytes / 1e9 / self._best_seconds(transfer)
        self._kv_cache.finished_transfers()
        return seconds

    def _host_microseconds(self) -> Figures:
        """Measure a block's cost for the scheduling thread."""
        copies = self._copies(scattered=True)
        directions = {"out": Moves(swap_out=copies), "in": Moves(swap_in=_reversed(copies))}
        figures = {}
        for name, moves in directions.items():
            self._synchronize()
            started = time.perf_counter()
            self._kv_cache.apply_transfers(Transfers(moves))
            figures[name] = 1e6 * (time.perf_counter() - started) / len(copies)
            self._synchronize()
        self._kv_cache.finished_transfers()
        return figures

    def _decode(self, batch: int, num_prompt_tokens: int, link: Figures) -> Figures:
        """Measure steps that move as much as the link carries in 90 % of a quiet step, each way and both.

        Steps get longer as sequences grow, 3 % in 100 steps, so quiet steps are timed before and after each case.
        """
        executor = SwappingExecutor(self._runner)
        engine = make_engine(self._runner, executor, enable_prefix_caching=False)
        for index in range(batch):
            engine.add_request(request(f"{index}", self._prompt(num_prompt_tokens), 10 * DECODE_STEPS))
        while engine.stats().last_step.num_sampled_tokens < batch:
            engine.step()
        self._steps(engine, executor, 10)
        quiet = self._steps(engine, executor, DECODE_STEPS)
        copies = self._copies(scattered=True)  # the first half goes out, the second comes in
        figures: Figures = {"sequences": batch, "prompt_tokens": num_prompt_tokens}
        for name, goes_out, comes_in in (("in", False, True), ("out", True, False), ("both", True, True)):
            out = self._blocks_in(0.9 * quiet, link["out_gbps"]) if goes_out else 0
            back = self._blocks_in(0.9 * quiet, link["in_gbps"]) if comes_in else 0
            content = self._fill(copies, num_on_device=out)
            moved = copies[:out] + copies[len(copies) - back :]
            executor.moves = Moves(copies[:out], _reversed(copies[len(copies) - back :]))
            self._steps(engine, executor, 5)
            seconds = self._steps(engine, executor, DECODE_STEPS)
            executor.moves = Moves()
            before, quiet = quiet, self._steps(engine, executor, DECODE_STEPS)
            figures[name] = {
                "quiet_ms": 1e3 * (before + quiet) / 2,
                "step_ms": 1e3 * seconds,
                "speed_ratio": (before + quiet) / 2 / seconds,
                "out_gbps": out * self._block_bytes / seconds / 1e9,
                "in_gbps": back * self._block_bytes / seconds / 1e9,
                "blocks_are_right": self._are_equal(moved, content),
            }
        for request_id in list(engine.request_ids):
            engine.abort_request(request_id)
        while engine.has_work:
            engine.step()
        return figures

    def _blocks_in(self, seconds: float, gbps: float) -> int:
        return min(max(1, int(seconds * gbps * 1e9 / self._block_bytes)), TRANSFER_BLOCKS // 2)

    def _steps(self, engine: Engine, executor: SwappingExecutor, number: int) -> float:
        """Return the seconds per step, with all transfers completed."""
        self._synchronize()
        started = time.perf_counter()
        for _ in range(number):
            engine.step()
        self._synchronize()
        return (time.perf_counter() - started) / number

    def _crossover(self, num_tokens: int) -> Figures:
        """Return the median milliseconds to the first token, with nothing else in the engine."""
        host = HostTierConfig(num_blocks=self._runner.num_host_blocks, offloaded_prefixes=OffloadedPrefixes.ALL)
        room = 2 * num_tokens // self._runner.block_size + 64
        engine = make_engine(self._runner, num_blocks=room, host=host)
        times: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
        for repeat in range(CROSSOVER_REPEATS + 1):
            prefix = self._prompt(num_tokens)
            for case, measured in times.items():
                if case != "device":
                    self._flush(engine, room)
                milliseconds, cached = self._first_token_ms(engine, [*prefix, *self._prompt(16)])
                assert (cached >= num_tokens) is (case != "computed"), (case, cached)
                if repeat:
                    measured.append(milliseconds)
        assert engine.stats().kv_totals.fetched_blocks > 0
        return {"tokens": num_tokens, **{f"{case}_ms": statistics.median(measured) for case, measured in times.items()}}

    def _flush(self, engine: Engine, num_blocks: int) -> None:
        """Overwrite every device block, which moves the previous content to the host."""
        num_tokens = min(2048, num_blocks * self._runner.block_size - 64)
        for index in range(-(-num_blocks * self._runner.block_size // num_tokens)):
            self._run(engine, [request(f"flush {index}", self._prompt(num_tokens), 1)])
        self._synchronize()

    def _first_token_ms(self, engine: Engine, tokens: list[int]) -> tuple[float, int]:
        started = time.perf_counter()
        engine.add_request(request("probe", tokens, 1))
        first, cached = 0.0, 0
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    first = time.perf_counter() - started
                elif isinstance(event, FinishEvent):
                    cached = event.usage.cached_tokens
        return 1e3 * first, cached

    def _run(self, engine: Engine, requests: list[GenerationRequest]) -> None:
        for one in requests:
            engine.add_request(one)
        while engine.has_work:
            engine.step()

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(100, self._runner.model_spec.vocab_size), k=num_tokens)

    def _host_blocks(self) -> torch.Tensor:
        assert self._kv_cache.host is not None, "the worker has no host pool"
        return self._kv_cache.host.blocks

    def _fill(self, copies: list[BlockCopy], num_on_device: int) -> dict[BlockCopy, torch.Tensor]:
        """Write new content, on the device for the first copies and on the host for the others."""
        pool = self._kv_cache.pool
        content = torch.randn(len(copies), *pool.shape[1:], device=pool.device).to(pool.dtype)
        self._synchronize()
        for index, copy in enumerate(copies):
            if index < num_on_device:
                pool[copy.source_block_id] = content[index]
            else:
                self._host_blocks()[copy.target_block_id] = content[index].cpu()
        return dict(zip(copies, content, strict=True))

    def _are_equal(self, copies: list[BlockCopy], content: dict[BlockCopy, torch.Tensor]) -> bool:
        """Return whether both sides of all copies hold their content."""
        self._synchronize()
        device, host = self._kv_cache.pool, self._host_blocks()
        return all(
            torch.equal(device[copy.source_block_id], content[copy])
            and torch.equal(host[copy.target_block_id].to(device.device), content[copy])
            for copy in copies
        )

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _best_seconds(self, function: Callable[[], Any], repeats: int = 5) -> float:
        best = float("inf")
        for _ in range(repeats):
            self._synchronize()
            started = time.perf_counter()
            function()
            self._synchronize()
            best = min(best, time.perf_counter() - started)
        return best


def _reversed(copies: list[BlockCopy]) -> list[BlockCopy]:
    return [BlockCopy(copy.target_block_id, copy.source_block_id) for copy in copies]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench kv-transfers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", metavar="PATH", type=Path, required=True)
    parser.add_argument("--device", metavar="NAME", default="auto")
    parser.add_argument("--kv-cache-memory-bytes", metavar="BYTES", type=int, default=24 * 2**30)
    parser.add_argument("--swap-space-bytes", metavar="BYTES", type=int, default=8 * 2**30)
    parser.add_argument("--max-model-len", metavar="N", type=int, default=16_384)
    parser.add_argument("--sections", metavar="NAME", default="crossover,decode,pressure")
    parser.add_argument("--out", metavar="PATH", type=Path, default=Path("bench/results"))
    options = parser.parse_args(argv)
    settings = ExecutionSettings(
        model=options.model,
        device=options.device,
        load_format="dummy",
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        swap_space_bytes=options.swap_space_bytes,
        max_model_len=options.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=8192,
    )
    runner = load_model_runner(settings, lambda phase, progress, detail: print(phase, f"{progress:.0%}", detail))
    bench = Bench(runner)
    report: Figures = {**provenance(["kv-transfers", *argv]), "block_bytes": runner.block_bytes}
    assert runner.speeds is not None, "there is no host pool"
    report["measured_at_start"] = asdict(runner.speeds)
    options.out.mkdir(parents=True, exist_ok=True)

    def keep(name: str, figures: Any) -> None:
        report[name] = figures
        (options.out / "kv_transfers.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for row in figures if isinstance(figures, list) else [figures]:
            print(name, json.dumps(row), flush=True)

    link = bench.link()
    keep("link", link)
    keep("transfers", bench.transfers(link))
    sections: dict[str, Callable[[], Any]] = {
        "decode": lambda: bench.decode(link),
        "crossover": bench.crossover,
        "pressure": bench.pressure,
    }
    for name in options.sections.split(","):
        keep(name, sections[name]())
    return 0
