"""Draft heads on a GPU in fp32: the drafts are those of the formulas, with and without graphs; no answer changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import DraftSettings, ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.model.draft_head.files import DraftHeadFiles
from tests.engine_worker.execution.draft_heads import DRAFT_TOKENS, HeadReference, write_head
from tests.engine_worker.execution.group_runs import in_own_process
from tests.engine_worker.execution.reference import write_model
from tests.engine_worker.execution.test_draft_head import (
    AHEAD,
    NUM_DRAFTS,
    OF_TWO,
    Recorder,
    check_drafts,
    num_right,
    requests,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

LIMITS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64}


def load(directory: Path, cudagraph_mode: str, drafts: DraftSettings, **options: Any) -> ModelRunner:
    settings = ExecutionSettings(
        model=directory,
        device="cuda",
        dtype="float32",
        swap_space_bytes=0,
        max_model_len=256,
        cudagraph_mode=cudagraph_mode,
        **{"kv_cache_memory_bytes": 2**26, **LIMITS, **options},
    )
    return load_model_runner(settings, lambda phase, progress, detail: None, drafts=drafts)


@pytest.mark.timeout(600)
@AHEAD
@pytest.mark.parametrize("cudagraph_mode", ["none", "full"])
def test_drafts_on_a_gpu_are_those_of_the_formulas(tmp_path: Path, cudagraph_mode: str, ahead: bool) -> None:
    target = write_model(tmp_path / "target", vocab_size=128, num_hidden_layers=8)
    head = write_head(tmp_path / "head", target, tokens=DRAFT_TOKENS)
    reference, recorder = HeadReference(head, target), Recorder(NUM_DRAFTS)
    wanted = [*requests(12, **OF_TWO), *requests(12, prefix="t", temperature=1.0, **OF_TWO)]
    plain, _ = run(load(target, cudagraph_mode, DraftSettings(num_drafts=NUM_DRAFTS)), wanted, **LIMITS)
    drafts = DraftSettings(num_drafts=NUM_DRAFTS, head=DraftHeadFiles("eagle3", head))
    drafted, engine = run(load(target, cudagraph_mode, drafts), wanted, recorder, ahead=ahead, **LIMITS)
    assert num_right(engine) > 20 and drafted.tokens == plain.tokens
    check_drafts(recorder, reference)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices here")
@pytest.mark.timeout(600)
@AHEAD
@pytest.mark.parametrize("cudagraph_mode", ["none", "full"])
def test_drafts_of_two_gpus_are_those_of_the_formulas(tmp_path: Path, cudagraph_mode: str, ahead: bool) -> None:
    target = write_model(tmp_path / "target", vocab_size=128, num_hidden_layers=8)
    head, recorder = write_head(tmp_path / "head", target, tokens=DRAFT_TOKENS), Recorder(NUM_DRAFTS)
    files = DraftHeadFiles("eagle3", head)
    plain, drafted, right, recorder.made = in_own_process(of_two_ranks, target, files, cudagraph_mode, ahead)
    assert right > 10 and drafted == plain
    check_drafts(recorder, HeadReference(head, target))


def of_two_ranks(
    directory: Path, files: DraftHeadFiles, cudagraph_mode: str, ahead: bool, **options: Any
) -> tuple[Any, Any, int, Any]:
    """Return the tokens without drafts, those with drafts, how many drafts were right, and all drafts."""
    recorder, wanted = Recorder(NUM_DRAFTS), requests(12, **OF_TWO)
    drafts = DraftSettings(num_drafts=NUM_DRAFTS, head=files)
    runner = load(directory, cudagraph_mode, drafts, tensor_parallel_size=2, **options)
    plain, _ = run(runner, wanted, **LIMITS)
    drafted, engine = run(runner, wanted, recorder, ahead=ahead, **LIMITS)
    return plain.tokens, drafted.tokens, num_right(engine), recorder.made
