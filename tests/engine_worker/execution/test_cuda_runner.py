"""The GPU runner equals the CPU in fp32, with graphs, async scheduling, chunked prefill, and preemption."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import CUDAGRAPH_MODES, ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from shared.messages import GenerationRequest
from tests.builders import make_request
from tests.engine_worker.execution.reference import make_engine, run_engine, run_engine_to_end, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

# Prompts of up to 512 tokens with decodes run as mixed graphs, longer ones without a graph.
LENGTHS = [1, 7, 15, 16, 17, 33, 64, 100, 129, 300, 640]
# name: (KV bytes, scheduler)
SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {
    "roomy": (2**28, {"max_num_seqs": 16, "max_num_batched_tokens": 2048}),
    "small_chunks": (2**28, {"max_num_seqs": 8, "max_num_batched_tokens": 64}),
    "preempted": (50 * 16 * 3 * 2 * 2 * 32 * 4, {"max_num_seqs": 16, "max_num_batched_tokens": 256}),
}

MANY: tuple[int, dict[str, Any]] = (2**28, {"max_num_seqs": 1024, "max_num_batched_tokens": 1024})


def requests(**sampling: float) -> list[GenerationRequest]:
    return [make_request(length, f"{length} tokens", max_tokens=40, ignore_eos=True, **sampling) for length in LENGTHS]


def outputs_and_preemptions(runner: ModelRunner, sampling: dict[str, Any], **config: Any) -> tuple[object, int]:
    engine = make_engine(runner, **config)
    transcript = run_engine_to_end(engine, requests(**sampling))
    return (transcript.tokens, transcript.others), sum(engine.stats().counters.preemptions.values())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def load(model_dir: Path, device: str, schedule: str, cudagraph_mode: str = "full_decode_only") -> ModelRunner:
    return load_scheduled(model_dir, device, *SCHEDULES[schedule], cudagraph_mode)


def load_scheduled(
    model_dir: Path, device: str, kv_cache_memory_bytes: int, config: dict[str, Any], cudagraph_mode: str
) -> ModelRunner:
    settings = ExecutionSettings(
        model=model_dir,
        device=device,
        dtype="float32",
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        swap_space_bytes=0,
        max_model_len=768,
        cudagraph_mode=cudagraph_mode,
        **config,
    )
    return load_model_runner(settings, lambda phase, progress, detail: None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}, {"temperature": 0.9, "seed": 7, "n": 2}],
    ids=["greedy", "seeded", "two_choices"],
)
def test_cuda_outputs_equal_cpu_with_every_schedule(model_dir: Path, sampling: dict[str, float]) -> None:
    expected, _ = outputs_and_preemptions(load(model_dir, "cpu", "roomy"), sampling, **SCHEDULES["roomy"][1])
    for schedule, mode in itertools.product(SCHEDULES, CUDAGRAPH_MODES):
        runner = load(model_dir, "cuda", schedule, mode)
        for ahead in (False, True):
            config = SCHEDULES[schedule][1] | {"async_scheduling": ahead}
            outputs, num_preemptions = outputs_and_preemptions(runner, sampling, **config)
            assert (num_preemptions > 0) == (schedule == "preempted")
            assert outputs == expected, f"{schedule}, graphs: {mode}, ahead: {ahead}"


@pytest.mark.timeout(600)
def test_cuda_graphs_many_sequences_do_not_change_outputs(model_dir: Path) -> None:
    """Requests arrive over several steps, so that steps compute up to 1,024 tokens, mostly decodes."""
    asked = [make_request(1 + number % 60, f"{number}", max_tokens=16, ignore_eos=True) for number in range(900)]
    config = MANY[1] | {"async_scheduling": True}
    transcripts = [
        run_engine_to_end(make_engine(load_scheduled(model_dir, "cuda", *MANY, mode), **config), asked)
        for mode in ("none", "full")
    ]
    assert transcripts[0].tokens == transcripts[1].tokens
    assert sum(map(len, transcripts[0].tokens.values())) == 900 * 16


@pytest.mark.timeout(600)
def test_cuda_groups_equal_cpu(model_dir: Path) -> None:
    """Covers forks without tokens, block copies, beams selected on the device, and preemption of whole groups."""
    kinds: dict[str, dict[str, Any]] = {
        "samples": {"n": 3, "temperature": 0.9, "seed": 7},
        "beams": {"n": 2, "use_beam_search": True, "beam_width": 4},
    }
    groups = [
        make_request(length, f"{length} of {kind}", max_tokens=30, ignore_eos=True, **sampling)
        for length in (1, 15, 16, 100)
        for kind, sampling in kinds.items()
    ]
    names = [(group.request_id, choice) for group in groups for choice in range(group.sampling.n)]
    roomy = SCHEDULES["roomy"][1]
    expected = run_engine(load(model_dir, "cpu", "roomy"), groups, **roomy)
    for schedule, ahead in itertools.product(SCHEDULES, (False, True)):
        runner = load(model_dir, "cuda", schedule)
        transcript = run_engine(runner, groups, **SCHEDULES[schedule][1] | {"async_scheduling": ahead})
        for name in names:
            assert transcript.choice(*name) == expected.choice(*name), f"{name}, {schedule}, ahead: {ahead}"
