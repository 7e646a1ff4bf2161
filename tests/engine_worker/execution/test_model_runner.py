"""ModelRunner and its loading: the results of a step, and isolation of each sequence's KV."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.transfers import BlockCopy, Moves, Transfers
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from kernels.token_bitmask import apply_token_bitmask
from tests.builders import make_request, make_sequence
from tests.engine_worker.execution.reference import generate, make_runner, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def runner(model_dir: Path) -> ModelRunner:
    return make_runner(model_dir, num_blocks=32, block_size=8)


def next_token(runner: ModelRunner, sequence: Sequence, start: int = 0) -> list[int] | None:
    scheduled = ScheduledSequence(sequence, start, sequence.num_tokens - start, samples=True)
    return runner.execute(ScheduledBatch([scheduled])).sampled_token_ids[0]


def test_runner_tokens_are_in_batch_order(runner: ModelRunner) -> None:
    alone = []
    sequences = []
    for index, length in enumerate((20, 3, 9)):
        sequence = make_sequence([3 + (7 * index + token) % 400 for token in range(length)])
        sequence.kv.tables[0].blocks = [1 + 3 * index, 2 + 3 * index, 3 + 3 * index]
        alone.append(next_token(runner, sequence))
        sequences.append(sequence)
    scheduled = [ScheduledSequence(sequence, 0, sequence.num_tokens, samples=True) for sequence in sequences]
    chunk = ScheduledSequence(make_sequence(12), 0, 5, samples=False)
    chunk.sequence.kv.tables[0].blocks = [20, 21]
    result = runner.execute(ScheduledBatch([scheduled[0], chunk, scheduled[1], scheduled[2]]))
    assert result.sampled_token_ids == [alone[0], None, alone[1], alone[2]]
    assert result.failures == {} and set(result.phase_seconds) == {"prepare", "forward", "sample"}
    assert len(set(map(tuple, filter(None, alone)))) == 3


def test_runner_nan_row_fails_alone(runner: ModelRunner) -> None:
    good, bad = make_sequence(5, "good"), make_sequence(5, "bad")
    good.kv.tables[0].blocks, bad.kv.tables[0].blocks = [1], [2]
    bad_start = 4  # its earlier keys are NaN in the cache
    runner.replica.kv_cache.pool[2] = torch.nan
    result = runner.execute(
        ScheduledBatch([ScheduledSequence(bad, bad_start, 1, True), ScheduledSequence(good, 0, 5, True)])
    )
    assert result.sampled_token_ids[0] is None and list(result.failures) == ["bad"]
    assert result.sampled_token_ids[1] is not None


def test_runner_stale_block_contents_are_never_read(model_dir: Path) -> None:
    requests = [make_request(length, f"{length}", max_tokens=20, ignore_eos=True) for length in (1, 7, 8, 30)]
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    clean, _ = generate(make_runner(model_dir, num_blocks=32, block_size=8), requests, **config)
    poisoned = make_runner(model_dir, num_blocks=32, block_size=8)
    poisoned.replica.kv_cache.pool[1:] = torch.nan
    assert generate(poisoned, requests, **config)[0] == clean


def test_runner_block_copies_precede_the_step(runner: ModelRunner) -> None:
    original = make_sequence(13)
    original.kv.tables[0].blocks = [1, 2]
    expected = next_token(runner, original)
    fork = make_sequence(original.prompt_token_ids)
    fork.kv.tables[0].blocks = [1, 5]  # shares the full block, copies the other
    last = ScheduledSequence(fork, 12, 1, samples=True)
    result = runner.execute(ScheduledBatch([last], Transfers(Moves(copies=[BlockCopy(2, 5)]))))
    assert result.sampled_token_ids == [expected]


def test_load_reports_phases_in_order(model_dir: Path) -> None:
    reports: list[tuple[str, float]] = []
    load_model_runner(
        ExecutionSettings(model=model_dir, device="cpu", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32),
        lambda phase, progress, detail: reports.append((phase, progress)),
    )
    assert list(dict.fromkeys(phase for phase, _ in reports)) == ["load", "allocate_kv", "warmup"]
    for phase in ("load", "allocate_kv", "warmup"):
        shares = [progress for name, progress in reports if name == phase]
        assert shares == sorted(shares) and shares[-1] == 1.0


def test_load_on_cpu_warms_up_one_step_of_each_kind(model_dir: Path) -> None:
    """A CPU compiles nothing; the warmup shapes of a GPU would dominate its start."""
    ran: list[str] = []
    load_model_runner(
        ExecutionSettings(model=model_dir, device="cpu", max_model_len=64, max_num_seqs=64, max_num_batched_tokens=64),
        lambda phase, progress, detail: ran.append(detail) if phase == "warmup" and progress > 0 else None,
    )
    assert ran == ["1 sequences, 32 tokens", "1 sequences, 1 tokens"]


def test_load_runs_rare_kernels_before_first_request(model_dir: Path) -> None:
    """On a GPU these kernels would otherwise be compiled during the steps of other requests."""
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    masks = mock.patch(
        "engine_worker.execution.sampling.sampling_inputs.apply_token_bitmask", wraps=apply_token_bitmask
    )
    copies = mock.patch("engine_worker.execution.step.kv_cache.copy_blocks", autospec=True)
    with masks as masked, copies as copied:
        load_model_runner(
            ExecutionSettings(model=model_dir, device="cpu", **settings), lambda phase, progress, detail: None
        )
    assert masked.call_count == 1
    assert [len(call.args[1]) for call in copied.call_args_list if call.args[1]] == [1]


def test_load_dummy_weights_need_only_config(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    runner = load_model_runner(
        ExecutionSettings(model=tmp_path, load_format="dummy", **settings), lambda phase, progress, detail: None
    )
    sequence = make_sequence(5)
    sequence.kv.tables[0].blocks = [1]
    assert next_token(runner, sequence) is not None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"max_model_len": 4096}, "--max-model-len: expected at most"),
        ({"kv_cache_memory_bytes": 100_000}, "--max-model-len"),
        ({"deterministic": True}, "--deterministic: needs --device cuda"),
    ],
)
def test_load_settings_that_do_not_fit_are_refused(changes: dict[str, Any], word: str, model_dir: Path) -> None:
    with pytest.raises(ValueError, match=word):
        load_model_runner(ExecutionSettings(model=model_dir, device="cpu", **changes), lambda *report: None)
