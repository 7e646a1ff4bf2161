"""Windows, softcap and sinks in the Triton attention kernels, against the float64 reference.

Blocks before all windows are released: their block table entries are block 0, which holds NaN.
"""

import dataclasses

import pytest
import torch

from bench.kernel.cases import AttentionBatch, HeadShape, attention_batch, exact_attention, measure_error
from kernels.attention import decode_plan, invariant
from kernels.attention.decode_plan import plan_decode
from kernels.attention.paged_attention import paged_attention_triton
from kernels.attention.score_rules import ScoreRules
from kernels.fp8_kv import KVScales

# From numpy, where tanh saturates: masked sums of NaN that is read as 480 (test_fp8_kv.py).
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

# As without rules; tanh is exact to an eps of the softcap, here up to 8 units of a score.
TOLERANCE = {torch.float32: 5e-6, torch.float16: torch.finfo(torch.float16).eps}
# Decode rows beside prompts, chunks after cached keys, without keys, at block and tile edges.
MIXED = [(63, 1), (0, 0), (27, 10), (0, 1), (100, 20), (150, 1)]

HEADS = HeadShape(3, 1, 64)


def build(
    rules: ScoreRules,
    lengths: list[tuple[int, int]] = MIXED,
    block_size: int = 16,
    shape: HeadShape = HEADS,
    dtype: torch.dtype = torch.float32,
    fp8_scales: KVScales | None = None,
) -> AttentionBatch:
    generator = torch.Generator().manual_seed(len(lengths))
    batch = attention_batch(shape, block_size, lengths, dtype, generator, fp8_scales)
    if rules.window:
        for table, (cached, _) in zip(batch.block_tables, lengths, strict=True):
            table[: max(cached - rules.window + 1, 0) // block_size] = 0
    return dataclasses.replace(batch, rules=rules)


def sinks(num_heads: int) -> torch.Tensor:
    """Return sinks from far below all scores to far above them."""
    return torch.linspace(-9, 9, num_heads)


def attend(batch: AttentionBatch, one_kernel: bool = False) -> torch.Tensor:
    return paged_attention_triton(**vars(batch), one_kernel=one_kernel)


def part(whole: AttentionBatch, first: int, end: int) -> AttentionBatch:
    """Return the tokens `first`..`end` of a batch of one sequence, over the same cache."""
    return dataclasses.replace(
        whole,
        query=whole.query[first:end],
        query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        max_query_len=end - first,
        max_seq_len=end,
    )


def assert_exact(batch: AttentionBatch, output: torch.Tensor) -> None:
    error = measure_error(output, exact_attention(batch), TOLERANCE[output.dtype])
    assert error.passed, error


@pytest.mark.parametrize("one_kernel", [False, True])
# Windows of one key, below and above a block and a tile, of a whole tile, and longer than every sequence.
@pytest.mark.parametrize(
    ("window", "block_size", "group"), [(1, 8, 4), (7, 16, 1), (32, 64, 7), (65, 32, 3), (200, 16, 2)]
)
def test_window_equals_the_reference(window: int, block_size: int, group: int, one_kernel: bool) -> None:
    batch = build(ScoreRules(window), MIXED, block_size, HeadShape(group, 1, 64))
    assert_exact(batch, attend(batch, one_kernel))


@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_score_rules_together_equal_the_reference(dtype: torch.dtype, one_kernel: bool) -> None:
    batch = build(ScoreRules(40, 8.0, sinks(3)), dtype=dtype)
    assert_exact(batch, attend(batch, one_kernel))
    stored = build(batch.rules, dtype=dtype, fp8_scales=KVScales(0.75, 1.5))
    assert_exact(stored, attend(stored, one_kernel))


def test_sinks_of_split_rows_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "MIN_SPLIT_TOKENS", 128)
    batch = build(ScoreRules(sinks=sinks(4)), [(700, 1), (10, 1)], shape=HeadShape(4, 1, 64))
    assert_exact(batch, attend(batch))
    monkeypatch.setattr(invariant, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(invariant, "PROGRAMS_PER_SM", 4)  # two sequences: two programs for a row's splits
    assert_exact(batch, attend(batch, one_kernel=True))


@pytest.mark.parametrize("programs_per_sm", [1, 3], ids=["splits one by one", "splits side by side"])
def test_score_rules_keep_the_bits_of_prompt_and_decode(programs_per_sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(invariant, "PROGRAMS_PER_SM", programs_per_sm)
    # The last rows see the end of the second split and all of the third; the window hides the first.
    whole = build(ScoreRules(70, 8.0, sinks(2)), [(0, 140)], shape=HeadShape(2, 1, 64))
    expected = attend(whole, one_kernel=True)
    assert_exact(whole, expected)
    for first, end in ((33, 34), (110, 140), (139, 140)):
        assert torch.equal(attend(part(whole, first, end), one_kernel=True), expected[first:end])


def test_chunked_prompt_with_window_has_the_same_bits() -> None:
    whole = build(ScoreRules(50, sinks=sinks(2)), [(0, 150)], shape=HeadShape(2, 1, 64))
    expected = attend(whole)
    assert_exact(whole, expected)
    for first, end in ((33, 110), (110, 150)):
        assert torch.equal(attend(part(whole, first, end)), expected[first:end])


@pytest.mark.parametrize(
    ("seq_len", "window", "items"),
    [
        (100, 128, [(0, 100, 0)]),
        (1000, 128, [(768, 1000, 872)]),
        (1000, 500, [(384, 640, 500), (640, 896, 500), (896, 1000, 500)]),
    ],
)
def test_plan_skips_keys_before_the_window(seq_len: int, window: int, items: list[tuple[int, int, int]]) -> None:
    lengths, starts = torch.tensor([seq_len], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    plan = plan_decode(starts, lengths, max_seq_len=131072, num_heads=2, head_dim=64, window=window)
    assert plan.num_items.tolist() == [len(items)] and len(plan.items) <= 3
    found = plan.items[: len(items)]
    assert [(first, end, visible) for _, _, first, end, _, visible in found[:, :6].tolist()] == items
