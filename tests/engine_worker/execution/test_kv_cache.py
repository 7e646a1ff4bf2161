"""KV cache: the number of blocks that fit, refusals with numbers, and copies between blocks."""

from pathlib import Path

import pytest
import torch

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.host_pool import _runs, copy_runs
from engine_worker.execution.step.kv_cache import (
    KVCache,
    KVCacheTooSmall,
    cache_budget,
    check_cache_bytes,
    check_capacity,
    copy_blocks,
    num_blocks_that_fit,
    num_host_blocks_that_fit,
)
from engine_worker.execution.step.memory import DeviceMemory, MemoryUnknown, _host_memory
from engine_worker.kv.layout import KVGroup, KVLayout, num_state_blocks_that_fit
from engine_worker.kv.transfers import BlockCopy, Moves, Transfers
from engine_worker.model.architectures import spec_from_json
from engine_worker.model.spec import kv_layout
from tests.engine_worker.execution.reference import write_model

MIB = 2**20
CONFIG = spec_from_json(
    {
        "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "dtype": "float32",
    }, {},
)  # fmt: skip
MIB_A_BLOCK = KVLayout(
    groups=(KVGroup(layers=tuple(range(32)), num_kv_heads=8, head_dim=32, dtype="float32"),), block_size=16
)
LAYOUT = kv_layout(CONFIG, 8, "float32")


def memory(free_mib: int, device: str = "cpu") -> DeviceMemory:
    return DeviceMemory(
        device=torch.device(device),
        total_bytes=16_000 * MIB,
        free_bytes=free_mib * MIB,
        weights_bytes=257 * MIB,
        step_bytes=500 * MIB,
    )


@pytest.mark.parametrize(
    ("free_mib", "device", "num_bytes", "ratio", "max_blocks", "expected"),
    [
        (4000, "cpu", 100 * MIB, None, 10**6, 100),  # explicit bytes
        (10, "cpu", 100 * MIB, None, 10, 100),  # explicit bytes, more than is free
        (4000, "cpu", None, None, 10**6, 1000),  # a quarter of the free memory
        (12_000, "cpu", None, None, 10**6, 2048),  # limited to 2 GiB by default
        (12_000, "cpu", None, 0.5, 10**6, 6000),  # explicit ratio
        (15_000, "cuda", None, None, 10**6, 0.92 * 16_000 - 1000 - 500),  # less the memory in use and a step's needs
        (15_000, "cuda", None, 0.5, 10**6, 0.5 * 16_000 - 1000 - 500),
        (1500, "cuda", None, None, 10**6, 0),
        (4000, "cpu", None, None, 77, 77),  # more blocks could never be used
    ],
)
def test_kv_pool_size_follows_memory_and_settings(
    free_mib: int, device: str, num_bytes: int | None, ratio: float | None, max_blocks: int, expected: float
) -> None:
    budget = cache_budget(memory(free_mib, device), num_bytes, ratio)
    assert num_blocks_that_fit(budget, MIB, max_blocks if num_bytes is None else None) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_than_all_memory_is_refused_by_its_setting(device: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-cache-memory-bytes: .* of {device}, 16,000 MiB; got 16777217000"):
        check_cache_bytes(16_777_217_000, memory(4000, device))


def test_more_than_all_memory_is_refused_before_weights_load(tmp_path: Path) -> None:
    reports = []
    settings = ExecutionSettings(
        model=write_model(tmp_path), device="cpu", dtype="float32", kv_cache_memory_bytes=2**60, max_num_seqs=1
    )
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes: expected at most the memory of cpu"):
        load_model_runner(settings, lambda phase, progress, _: reports.append((phase, progress)))
    assert reports == [("load", 0.0)]


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "expected"),
    [
        (10_000, 4, 17),  # a live state and three checkpoints per slot, and block 0
        (1000, 256, 400),  # 40 %
        (10, 256, 9),  # at least eight
        (10, 1, 5),  # but no more than can be used
    ],
)
def test_state_pool_takes_a_part_of_the_budget(budget: int, max_num_seqs: int, expected: int) -> None:
    assert num_state_blocks_that_fit(budget * MIB, MIB, max_num_seqs) == expected
    assert num_state_blocks_that_fit(budget * MIB, 0, max_num_seqs) == 0


def test_kv_capacity_must_hold_one_sequence_and_padding() -> None:
    check_capacity(num_blocks=65, layout=MIB_A_BLOCK, max_model_len=1024, max_new_tokens=512, memory=memory(4000))
    with pytest.raises(KVCacheTooSmall):
        check_capacity(num_blocks=64, layout=MIB_A_BLOCK, max_model_len=1024, max_new_tokens=512, memory=memory(4000))


def test_kv_refusal_has_numbers_and_fitting_flags() -> None:
    with pytest.raises(KVCacheTooSmall) as refusal:
        check_capacity(num_blocks=101, layout=MIB_A_BLOCK, max_model_len=8192, max_new_tokens=512, memory=memory(4000))
    text = str(refusal.value)
    for part in ("8192 tokens", "16,000 MiB in all", "4,000 MiB free", "257 MiB of weights", "65,536 bytes a token"):
        assert part in text
    assert f"--kv-cache-memory-bytes {513 * MIB}" in text and "--max-model-len 1600" in text


def test_kv_refusal_advice_stays_within_free_memory() -> None:
    with pytest.raises(KVCacheTooSmall) as refusal:
        check_capacity(num_blocks=101, layout=MIB_A_BLOCK, max_model_len=8192, max_new_tokens=512, memory=memory(500))
    assert "--kv-cache-memory-bytes" not in str(refusal.value) and "--max-model-len 1600" in str(refusal.value)
    with pytest.raises(KVCacheTooSmall, match="Nothing fits"):
        check_capacity(num_blocks=0, layout=MIB_A_BLOCK, max_model_len=8192, max_new_tokens=512, memory=memory(500))


def test_kv_copies_move_all_layers_of_a_block() -> None:
    cache = KVCache(LAYOUT, num_blocks=4, device=torch.device("cpu"))
    assert cache.pool.shape == (4, 2, 2, 1, 8, 4) and not cache.pool.any()
    cache.pool[1], cache.pool[2] = 1.0, 2.0
    copy_blocks(cache.pool, [BlockCopy(1, 3), BlockCopy(2, 1)])  # 1 is read before it is overwritten
    assert [float(block.unique()) for block in cache.pool] == [0.0, 2.0, 2.0, 1.0]


def test_host_memory_respects_container_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000 kB\nMemFree: 1 kB\nMemAvailable:  6000 kB\n")
    assert _host_memory(meminfo, tmp_path) == (8000 * 1024, 6000 * 1024)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1024000\n")
    assert _host_memory(meminfo, tmp_path) == (8000 * 1024, 6000 * 1024)
    (tmp_path / "memory.max").write_text("3072000\n")
    assert _host_memory(meminfo, tmp_path) == (3_072_000, 2_048_000)


def test_host_memory_unknown_asks_for_flag(tmp_path: Path) -> None:
    with pytest.raises(MemoryUnknown, match="--kv-cache-memory-bytes"):
        _host_memory(tmp_path / "absent", tmp_path)


def test_kv_block_swaps_out_and_in_with_all_layers() -> None:
    cache = KVCache(LAYOUT, 4, torch.device("cpu"), num_host_blocks=3)
    cache.pool[1], cache.pool[2] = 1.0, 2.0
    cache.apply_transfers(Transfers(Moves(swap_out=[BlockCopy(1, 2), BlockCopy(2, 1)]), batch_number=7))
    cache.pool[1:3] = 0.0
    cache.apply_transfers(Transfers(Moves(swap_in=[BlockCopy(2, 3)]), batch_number=8))
    assert [float(block.unique()) for block in cache.pool] == [0.0, 0.0, 0.0, 1.0]
    out, back = cache.finished_transfers()
    assert (out.batch_number, back.batch_number) == (7, 8)
    assert out.swap_out_seconds > 0 and back.swap_in_seconds > 0
    assert cache.finished_transfers() == []


def test_kv_transfers_run_out_then_in_then_copies() -> None:
    cache = KVCache(LAYOUT, 4, torch.device("cpu"), num_host_blocks=3)
    assert cache.host is not None
    cache.pool[1], cache.pool[2] = 1.0, 2.0
    cache.host.blocks[1] = 9.0
    cache.apply_transfers(Transfers(Moves([BlockCopy(1, 2)], [BlockCopy(1, 1)], [BlockCopy(2, 3)])))
    assert float(cache.host.blocks[2].unique()) == 1.0
    assert [float(block.unique()) for block in cache.pool] == [0.0, 9.0, 2.0, 2.0]


def test_kv_copies_of_adjacent_blocks_are_merged() -> None:
    pairs = [(1, 4), (2, 5), (3, 6), (5, 7), (6, 9), (7, 8)]
    runs = list(_runs([BlockCopy(*pair) for pair in pairs]))
    assert [[copy.source_block_id for copy in run] for run in runs] == [[1, 2, 3], [5], [6], [7]]
    source, target = torch.arange(10.0)[:, None], torch.zeros(10, 1)
    copy_runs(source, target, [BlockCopy(*pair) for pair in pairs])
    assert target[:, 0].tolist() == [0, 0, 0, 0, 1, 2, 3, 5, 7, 6]


@pytest.mark.parametrize(("num_bytes", "num_blocks"), [(0, 0), (2 * 4096, 2), (3 * 4096 - 1, 2)])
def test_host_pool_size_rounds_down_to_blocks(num_bytes: int, num_blocks: int) -> None:
    assert num_host_blocks_that_fit(num_bytes, bytes_per_block=4096) == num_blocks


def test_host_pool_too_small_or_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected 0 or at least 8192 \(two blocks\)"):
        num_host_blocks_that_fit(8191, bytes_per_block=4096)
    with pytest.raises(ValueError, match="at most the free memory of this host"):
        num_host_blocks_that_fit(2**60, bytes_per_block=4096)
