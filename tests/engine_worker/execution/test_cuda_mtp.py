"""Multi-token prediction on a GPU in fp32: drafts are those of transformers, and no answer changes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.execution.settings import NO_DRAFTS, DraftSettings
from engine_worker.model.draft_head.files import DraftHeadFiles
from tests.engine_worker.execution.draft_heads import DRAFT_TOKENS
from tests.engine_worker.execution.group_runs import in_own_process
from tests.engine_worker.execution.mtp_heads import write_mtp
from tests.engine_worker.execution.test_cuda_draft_head import LIMITS, load, of_two_ranks
from tests.engine_worker.execution.test_draft_head import AHEAD, NUM_DRAFTS, OF_TWO, Recorder, num_right, requests, run
from tests.engine_worker.execution.test_mtp import check_drafts
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 2**27, "deterministic": True}


@pytest.mark.timeout(600)
@AHEAD
@pytest.mark.parametrize("cudagraph_mode", ["none", "full"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "glm4_moe"])
def test_drafts_on_a_gpu_are_those_of_transformers(
    tmp_path: Path, family: str, cudagraph_mode: str, ahead: bool
) -> None:
    directory = write_mtp(write_family(tmp_path, NATIVE[family]), DRAFT_TOKENS)
    recorder = Recorder(NUM_DRAFTS)
    wanted = [*requests(12, **OF_TWO), *requests(12, prefix="t", temperature=1.0, **OF_TWO)]
    plain, _ = run(load(directory, cudagraph_mode, NO_DRAFTS, **OPTIONS), wanted, **LIMITS)
    drafts = DraftSettings(num_drafts=NUM_DRAFTS, head=DraftHeadFiles("mtp", directory))
    drafted, engine = run(load(directory, cudagraph_mode, drafts, **OPTIONS), wanted, recorder, ahead=ahead, **LIMITS)
    assert num_right(engine) > 5 and drafted.tokens == plain.tokens
    check_drafts(recorder, directory)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices here")
@pytest.mark.timeout(600)
@AHEAD
@pytest.mark.parametrize("cudagraph_mode", ["none", "full"])
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "glm4_moe"])
def test_drafts_of_two_gpus_are_those_of_transformers(
    tmp_path: Path, family: str, cudagraph_mode: str, ahead: bool
) -> None:
    directory = write_mtp(write_family(tmp_path, NATIVE[family]), DRAFT_TOKENS)
    recorder = Recorder(NUM_DRAFTS)
    plain, drafted, right, recorder.made = in_own_process(
        partial(of_two_ranks, **OPTIONS), directory, DraftHeadFiles("mtp", directory), cudagraph_mode, ahead
    )
    assert right > 5 and drafted == plain
    check_drafts(recorder, directory)
