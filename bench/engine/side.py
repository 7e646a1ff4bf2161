"""This engine under the benchmark: a batch of requests from first to last token, without HTTP and store."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine_worker.engine import Engine
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.messages import GenerationRequest, SamplingParams, TokenEvent


@dataclass(frozen=True, slots=True)
class Run:
    seconds_to_first_tokens: float  # until every sequence has its first token: the prefill
    seconds: float
    num_tokens_with_all: int  # generated after every sequence had its first token
    outputs: list[list[int]]

    @property
    def decode_tokens_per_second(self) -> float:
        """Return the rate while all sequences decode and nothing else is computed."""
        return self.num_tokens_with_all / (self.seconds - self.seconds_to_first_tokens)

    @property
    def e2e_tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


class NoPeer(RuntimeError):
    """A peer cannot run here; the message gives the reason."""


Timed = Callable[[list[list[int]], int], tuple[float, list[list[int]]]]  # prompts, output tokens -> seconds and outputs


def run_peer(timed: Timed, prompts: list[list[int]], output_tokens: int) -> Run:
    """Time a peer without streaming; its prefill is timed by a run with one output token."""
    to_first, outputs = timed(prompts, 1)
    if output_tokens == 1:
        return Run(to_first, to_first, 0, outputs)
    seconds, outputs = timed(prompts, output_tokens)
    return Run(min(to_first, seconds), seconds, sum(len(output) - 1 for output in outputs), outputs)


def plain_engine(runner: ModelRunner, config: SchedulerConfig) -> Engine:
    """Make an engine without a prefix cache and without end tokens, so that each run computes everything."""
    return Engine(
        Scheduler(
            config,
            KVCacheManager(
                runner.num_blocks,
                runner.block_size,
                enable_prefix_caching=False,
                windows=runner.windows,
                num_state_blocks=runner.num_state_blocks,
            ),
        ),
        runner,
        eos_token_ids=(),
        vocab_size=runner.model_spec.vocab_size,
        clock=time.perf_counter,
    )


def run_engine(
    runner: ModelRunner, prompts: list[list[int]], output_tokens: int, scheduling: SchedulerConfig | None = None
) -> Run:
    """Generate exactly `output_tokens` greedily for all prompts at once; default: 4096 tokens per step."""
    config = scheduling or SchedulerConfig(
        max_num_seqs=len(prompts), max_num_batched_tokens=4096, max_model_len=runner.max_model_len
    )
    engine = plain_engine(runner, config)
    sampling = SamplingParams(max_tokens=output_tokens, seed=0, temperature=0.0, ignore_eos=True)
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    without_tokens = set(outputs)
    started = time.perf_counter()
    first_tokens_at = started
    num_tokens_with_all = 0
    for request_id, prompt in zip(outputs, prompts, strict=True):
        engine.add_request(GenerationRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        prefilling = bool(without_tokens)
        for event in engine.step():
            if isinstance(event, TokenEvent):
                outputs[event.request_id] += event.token_ids
                without_tokens.discard(event.request_id)
                num_tokens_with_all += 0 if prefilling else len(event.token_ids)
        if prefilling:
            first_tokens_at = time.perf_counter()
    ended = time.perf_counter()
    return Run(first_tokens_at - started, ended - started, num_tokens_with_all, list(outputs.values()))
