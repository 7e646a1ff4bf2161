"""Drafts change no answer on a GPU with --deterministic: 500 requests with every parameter, and models with states."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import DraftSettings, ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from tests.builders import Transcript, drafting_by
from tests.engine_worker.execution import test_drafts_of_hybrids as hybrids
from tests.engine_worker.execution.group_runs import in_own_process
from tests.engine_worker.execution.reference import make_engine, run_engine_to_end, write_model
from tests.engine_worker.execution.test_ngram_drafts import SHORTEST, CheckedProposer
from tests.engine_worker.execution.test_speculation import MAKERS, VOCAB_SIZE, answers, mixed_requests, run
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
NUM_REQUESTS = 500
MAX_SAMPLES, HYBRID_SAMPLES = 128, 24  # of the runners
SIZES: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
MAX_DRAFTS = 3


def load(
    directory: Path, *, num_drafts: int, ngram_lengths: tuple[int, int] | None = None, **options: Any
) -> ModelRunner:
    settings = ExecutionSettings(
        model=directory,
        device="cuda",
        kv_cache_memory_bytes=2**28,
        swap_space_bytes=0,
        max_model_len=512,
        **{"dtype": "bfloat16", "deterministic": True, **options},
    )
    drafts = DraftSettings(num_drafts=num_drafts, ngram_lengths=ngram_lengths)
    return load_model_runner(settings, lambda phase, progress, detail: None, drafts=drafts)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cudagraph_mode", ["none", "full_decode_only"])
def test_drafts_change_no_answer_of_500_requests(directory: Path, cudagraph_mode: str) -> None:
    limits: dict[str, Any] = {**SIZES, "max_num_seqs": MAX_SAMPLES, "cudagraph_mode": cudagraph_mode}
    plain = run(load(directory, num_drafts=0, **limits), None, 0, NUM_REQUESTS, **SIZES)
    runner = load(directory, num_drafts=MAX_DRAFTS, **limits)

    def is_equal(name: str, max_drafts: int, is_ahead: bool) -> bool:
        config = {**SIZES, "async_scheduling": is_ahead}
        found = run(runner, MAKERS[name](plain), max_drafts, NUM_REQUESTS, MAX_SAMPLES, **config)
        return answers(found) == answers(plain)

    cases = product(MAKERS, (1, MAX_DRAFTS), (False, True))
    differing = [case for case in cases if not is_equal(*case)]
    assert not differing


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cudagraph_mode", ["none", "full_decode_only"])
def test_searches_on_the_device_change_no_answer_of_500_requests(
    directory: Path, cudagraph_mode: str, ahead: bool
) -> None:
    limits: dict[str, Any] = {**SIZES, "max_num_seqs": MAX_SAMPLES, "cudagraph_mode": cudagraph_mode}
    plain = run(load(directory, num_drafts=0, **limits), None, 0, NUM_REQUESTS, **SIZES)
    runner, proposer = load(directory, num_drafts=MAX_DRAFTS, ngram_lengths=(SHORTEST, 4), **limits), CheckedProposer()
    drafting = drafting_by(proposer, MAX_DRAFTS, max_samples=MAX_SAMPLES, may_run_ahead=ahead)
    engine = make_engine(runner, drafting=drafting, async_scheduling=ahead, **SIZES)
    found = run_engine_to_end(engine, mixed_requests(NUM_REQUESTS))
    assert answers(found) == answers(plain)
    assert not proposer.different[:1] and proposer.num_equal > 1000


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices here")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cudagraph_mode", ["none", "full_decode_only"])
def test_searches_of_two_gpus_change_no_answer(directory: Path, cudagraph_mode: str) -> None:
    plain, found, num_different, num_equal = in_own_process(searches_of_two_ranks, directory, cudagraph_mode)
    assert answers(found) == answers(plain) and not num_different and num_equal > 250


def searches_of_two_ranks(directory: Path, cudagraph_mode: str) -> tuple[Transcript, Transcript, int, int]:
    """Return the answers without drafts and with them, and how many drafts differ from those of the host or do not."""
    limits: dict[str, Any] = {**SIZES, "max_num_seqs": MAX_SAMPLES, "cudagraph_mode": cudagraph_mode}
    runner = load(directory, num_drafts=MAX_DRAFTS, ngram_lengths=(SHORTEST, 4), tensor_parallel_size=2, **limits)
    plain = run_engine_to_end(make_engine(runner, **SIZES), mixed_requests())
    proposer = CheckedProposer()
    drafting = drafting_by(proposer, MAX_DRAFTS, max_samples=MAX_SAMPLES, may_run_ahead=True)
    found = run_engine_to_end(make_engine(runner, drafting=drafting, async_scheduling=True, **SIZES), mixed_requests())
    return plain, found, len(proposer.different), proposer.num_equal


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "granitemoehybrid", "nemotron_h"])
def test_drafts_change_no_answer_of_hybrids(tmp_path: Path, family: str, dtype: str) -> None:
    directory = write_family(tmp_path, NATIVE[family])
    limits: dict[str, Any] = {
        "dtype": dtype,
        **hybrids.SIZES,
        "max_num_seqs": HYBRID_SAMPLES,
    }
    plain = run_engine_to_end(make_engine(load(directory, num_drafts=0, **limits), **hybrids.SIZES), hybrids.requests())
    runner, accepted = load(directory, num_drafts=MAX_DRAFTS, **limits), []
    for error_ratio in (0.0, 0.4, 1.0):
        drafting = drafting_by(hybrids.mostly_right(plain, error_ratio), MAX_DRAFTS, max_samples=HYBRID_SAMPLES)
        engine = make_engine(runner, drafting=drafting, **hybrids.SIZES)
        found = run_engine_to_end(engine, hybrids.requests())
        assert found.tokens == plain.tokens and found.others == plain.others, error_ratio
        accepted.append(sum(engine.stats().speculation.accepted))
    assert accepted[0] > accepted[1] > accepted[2]
