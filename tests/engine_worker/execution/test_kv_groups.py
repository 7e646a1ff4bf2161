"""Groups of layers with their own block tables give the tokens of one group, and free the blocks outside windows."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine_worker.execution.load import load_replica
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.model.spec import kv_layout
from kernels.cpu.build import NoLibrary
from tests.builders import make_request
from tests.engine_worker.execution import reference
from tests.engine_worker.execution.reference import make_engine, make_runner, run_engine_to_end
from tests.engine_worker.model.families import prompts, write_family
from tests.engine_worker.model.family_cases import NATIVE

SCHEDULE: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 8}


@pytest.fixture(scope="module", params=["gemma3_text", "granite_swa", "lfm2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("grouped"), NATIVE[request.param])


def tokens_of(runner: ModelRunner, mode: PreemptionMode = PreemptionMode.RECOMPUTE) -> tuple[dict[str, list[int]], int]:
    """Return the tokens by request, and the preemptions."""
    engine = make_engine(runner, preemption_mode=mode, **SCHEDULE)
    requests = [
        make_request(prompt, f"p{index}", max_tokens=120, ignore_eos=True)
        for index, prompt in enumerate(prompts(runner.model_spec.vocab_size))
    ]
    transcript = run_engine_to_end(engine, requests)
    engine.check_integrity()
    return transcript.tokens, sum(engine.stats().counters.preemptions.values())


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def no_library() -> None:
        raise NoLibrary("not in this test")

    if request.param:
        monkeypatch.setattr("engine_worker.model.compiled_step.cpu_library", no_library)


@pytest.mark.parametrize("without_kernels", [False, True], ids=["C++", "torch"], indirect=True)
@pytest.mark.usefixtures("without_kernels")
def test_groups_merged_and_split_give_equal_tokens(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = make_runner(directory, num_blocks=400, block_size=8, num_threads=1)
    assert len(split.windows) > 1 and len(set(split.windows)) == 2
    expected, _ = tokens_of(split)
    few = split.replica.kv_cache.layout.max_blocks(260, 16)
    for num_host_blocks, mode in ((0, PreemptionMode.RECOMPUTE), (few, PreemptionMode.SWAP)):
        runner = make_runner(directory, num_blocks=few, block_size=8, num_host_blocks=num_host_blocks, num_threads=1)
        tokens, num_preemptions = tokens_of(runner, mode)
        assert tokens == expected and num_preemptions > 0, mode
    for module in (load_replica, reference):
        monkeypatch.setattr(module, "kv_layout", partial(kv_layout, max_groups=1))
    merged = make_runner(directory, num_blocks=400, block_size=8, num_threads=1)
    assert merged.windows == [0]
    assert tokens_of(merged) == (expected, 0)
