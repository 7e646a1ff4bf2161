"""The CPU's paged attention against the kernel's reference with the same arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.attention import cpu, cpu_scores
from kernels.attention.paged_attention import paged_attention_reference
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.fp8_kv import E4M3, UNIT_SCALES, KVScales, to_e4m3

# (query_len, seq_len) of each sequence
BATCHES = {
    "one_decode": [(1, 5)],
    "decode_at_block_edges": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 64), (1, 65)],
    "many_decodes": [(1, 100 + 7 * index) for index in range(20)],
    "lengths_far_apart": [(1, 3), (1, 900), (1, 5), (1, 880), (1, 4), (1, 870)],
    "prefill": [(33, 33)],
    "chunk_after_a_prefix": [(20, 50), (2, 400)],
    "mixed_in_any_order": [(10, 40), (1, 30), (7, 7), (1, 200), (1, 1)],
}


def random_batch(
    lengths: list[tuple[int, int]], *, block_size: int, num_kv_heads: int, group: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(len(lengths))
    head_dim, num_layers, layer = 16, 3, 1
    max_blocks = max(-(-seq_len // block_size) for _, seq_len in lengths)
    num_blocks = 1 + max_blocks * len(lengths)
    pool = torch.randn(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim, generator=generator).to(dtype)
    pool[0] = 0
    tables = (torch.randperm(num_blocks - 1, generator=generator) + 1).view(len(lengths), max_blocks).int()
    query_lens = torch.tensor([query_len for query_len, _ in lengths])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0))).int()
    seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32)
    query = torch.randn(int(starts[-1]), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    longest = int(query_lens.max()), int(seq_lens.max())
    return query, pool[:, layer, 0], pool[:, layer, 1], tables, starts, seq_lens, *longest, head_dim**-0.5


def paged_attention_cpu(
    *arguments: Any, kv_scales: KVScales = UNIT_SCALES, rules: ScoreRules = NO_RULES
) -> torch.Tensor:
    """Run one layer of a step by PagedAttentionPlan, with the arguments and result of the kernel's reference."""
    query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, _, _, scale = arguments
    query_lens = query_start_loc.diff()
    order = sorted(range(len(seq_lens)), key=lambda s: (query_lens[s] > 1, seq_lens[s]))
    tokens = torch.cat([torch.arange(int(query_start_loc[s]), int(query_start_loc[s + 1])) for s in order])
    starts = torch.nn.functional.pad(query_lens[order].cumsum(0), (1, 0))
    layout = cpu.CacheLayout.of(key_cache, value_cache)
    tables, lengths = block_tables[order], seq_lens[order]
    plan = cpu.PagedAttentionPlan(layout, tables, starts, lengths, query.dtype, cpu.GatherBuffer(), rules.window)
    output = torch.empty_like(query)
    attended = plan.attend(query[tokens].flatten(1), layout.layer(key_cache, kv_scales), scale, rules)
    output[tokens] = attended.view_as(query)
    return output


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 4), (3, 3), (4, 1)])
@pytest.mark.parametrize("block_size", [8, 16])
def test_cpu_paged_attention_equals_the_reference(name: str, num_kv_heads: int, group: int, block_size: int) -> None:
    arguments = random_batch(
        BATCHES[name], block_size=block_size, num_kv_heads=num_kv_heads, group=group, dtype=torch.float32
    )
    torch.testing.assert_close(paged_attention_cpu(*arguments), paged_attention_reference(*arguments))


RULES = {
    "window of 1": ScoreRules(window=1),
    "window within a block": ScoreRules(window=5),
    "window of a block": ScoreRules(window=16),
    "window over blocks": ScoreRules(window=37),
    "window of more than a piece": ScoreRules(window=300),
    "softcap": ScoreRules(softcap=1.5),
    "softcap and window": ScoreRules(window=9, softcap=0.5),
}
REFERENCE: Callable[..., torch.Tensor] = paged_attention_reference
LONG_PROMPTS = {"long_prompts": [(700, 700), (330, 1000)], "many_pieces": [(1, 20), (520, 531)]}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", [*BATCHES, *LONG_PROMPTS])
def test_score_rules_equal_the_reference(name: str, rules: ScoreRules) -> None:
    lengths = (BATCHES | LONG_PROMPTS)[name]
    arguments = random_batch(lengths, block_size=16, num_kv_heads=2, group=3, dtype=torch.float32)
    torch.testing.assert_close(paged_attention_cpu(*arguments, rules=rules), REFERENCE(*arguments, rules=rules))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [0, 6])
def test_sinks_equal_the_reference(name: str, window: int) -> None:
    rules = ScoreRules(window=window, sinks=torch.linspace(-3, 3, 6))
    arguments = random_batch(BATCHES[name], block_size=8, num_kv_heads=2, group=3, dtype=torch.float32)
    torch.testing.assert_close(paged_attention_cpu(*arguments, rules=rules), REFERENCE(*arguments, rules=rules))


def test_blocks_before_a_window_are_not_read() -> None:
    """Another sequence may own them; here they hold NaN."""
    query, keys, values, tables, *rest = random_batch(
        [(1, 100), (20, 90)], block_size=8, num_kv_heads=2, group=2, dtype=torch.float32
    )
    rules = ScoreRules(window=20)
    expected = paged_attention_cpu(query, keys, values, tables, *rest, rules=rules)
    for sequence, first_seen in enumerate((100 - 20, 90 - 20 - 20 + 1)):
        behind = tables[sequence, : first_seen // 8].long()
        keys[behind] = values[behind] = torch.nan
        tables[sequence, : first_seen // 8] = 10**6
    assert torch.equal(paged_attention_cpu(query, keys, values, tables, *rest, rules=rules), expected)


@pytest.mark.parametrize("max_fused_work", [0, 10**9], ids=["bmm", "fused"])
def test_both_decode_paths_equal_the_reference(max_fused_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_scores, "_MAX_FUSED_WORK", max_fused_work)
    arguments = random_batch(
        BATCHES["decode_at_block_edges"], block_size=16, num_kv_heads=3, group=3, dtype=torch.float32
    )
    torch.testing.assert_close(paged_attention_cpu(*arguments), paged_attention_reference(*arguments))


def test_bf16_error_is_within_its_rounding() -> None:
    arguments = random_batch(BATCHES["many_decodes"], block_size=16, num_kv_heads=3, group=3, dtype=torch.bfloat16)
    # Scores of up to 4 are rounded to 8 bits before the softmax: 2^-7 in each weight; outputs are at most 2.
    torch.testing.assert_close(
        paged_attention_cpu(*arguments), paged_attention_reference(*arguments), atol=2**-6, rtol=2**-6
    )


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([], []),
        ([7], [(0, 1)]),
        ([10, 12, 300], [(0, 3)]),  # padding of 578 tokens costs less than a second group
        ([10, 12, 1000], [(0, 2), (2, 3)]),
        ([100] * 30 + [2000], [(0, 30), (30, 31)]),
        ([1000, 1100, 1200], [(0, 3)]),
    ],
)
def test_very_different_lengths_are_padded_separately(lengths: list[int], groups: list[tuple[int, int]]) -> None:
    assert list(cpu._similar_lengths(lengths)) == groups


def test_started_blocks_are_the_partly_filled_ones() -> None:
    tables = torch.tensor([[5, 0, 0], [6, 7, 0], [8, 9, 10]], dtype=torch.int32)
    layout = cpu.CacheLayout(num_kv_heads=1, block_size=4, head_dim=2, rows_per_block=2, rows_to_value=1)
    plan = cpu.PagedAttentionPlan(
        layout,
        tables,
        query_start_loc=torch.tensor([0, 1, 2, 7]),
        seq_lens=torch.tensor([3, 5, 9]),  # decode in block 5; decode starts block 7; a chunk starts block 10
        dtype=torch.float32,
        buffer=cpu.GatherBuffer(),
    )
    assert plan.started_blocks() == [7, 10]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_e4m3_cache_equals_its_dequantized_values(name: str, block_size: int) -> None:
    arguments = random_batch(BATCHES[name], block_size=block_size, num_kv_heads=2, group=3, dtype=torch.float32)
    query, keys, values, *rest = arguments
    scales = KVScales(key=0.75, value=1.5)
    pool = torch.stack((keys, values), dim=1)[:, None]  # [N, 1, 2, Hkv, BS, D]
    stored = torch.stack([to_e4m3(pool[:, :, 0], scales.key), to_e4m3(pool[:, :, 1], scales.value)], dim=2)
    dequantized = stored[:, 0, 0].float() * scales.key, stored[:, 0, 1].float() * scales.value
    expected = paged_attention_reference(query, *dequantized, *rest)
    cached = stored[:, 0, 0], stored[:, 0, 1]
    both: list[Callable[..., torch.Tensor]] = [paged_attention_cpu, paged_attention_reference]
    for attention in both:
        torch.testing.assert_close(attention(query, *cached, *rest, kv_scales=scales), expected)


def test_values_beyond_e4m3_saturate() -> None:
    numbers = torch.tensor([0.0, 448.0, 449.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 1.06, 2.0**-9])
    expected = torch.tensor([0.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0, torch.nan, 1.0, 2.0**-9])
    assert to_e4m3(numbers, 1.0).dtype == E4M3
    torch.testing.assert_close(to_e4m3(numbers, 1.0).float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(to_e4m3(numbers * 4, 4.0).float(), expected, rtol=0, atol=0, equal_nan=True)
