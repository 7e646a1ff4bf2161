"""The Triton kernels on an e4m3 cache, against its keys and values dequantized in float64.

The interpreter reads e4m3 exactly (except NaN, as 480), but rounds float32 to it wrongly where a value rounds up to a
power of two: 2.3 % of normal values become half of it. Comparisons of stored values exclude those.
"""

import dataclasses

import pytest
import torch

from bench.kernel.cases import AttentionBatch, HeadShape, attention_batch, exact_attention, measure_error
from kernels.attention import invariant
from kernels.attention.paged_attention import paged_attention_triton
from kernels.attention.widened import WidenedBlocks
from kernels.fp8_kv import E4M3, KVScales
from kernels.rotary_embedding import RotaryInput, rotate_and_store_reference, rotate_and_store_triton

SCALES = KVScales(key=0.75, value=1.5)
# Same as for a cache of the queries' dtype, since reading is exact.
TOLERANCE = {torch.float32: 5e-6, torch.float16: torch.finfo(torch.float16).eps}
# Decode rows beside prompts, without keys, at block and tile edges; chunks; several splits.
MIXED = [(63, 1), (0, 0), (27, 10), (0, 1), (64, 1), (40, 33), (300, 1), (5, 2)]


def build(
    lengths: list[tuple[int, int]], block_size: int, dtype: torch.dtype, head_dim: int = 64, group: int = 3
) -> AttentionBatch:
    generator = torch.Generator().manual_seed(len(lengths))
    return attention_batch(HeadShape(2 * group, 2, head_dim), block_size, lengths, dtype, generator, SCALES)


def assert_exact(batch: AttentionBatch, output: torch.Tensor) -> None:
    error = measure_error(output, exact_attention(batch), TOLERANCE[output.dtype])
    assert error.passed, error


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed_batch_equals_the_dequantized_reference(block_size: int, dtype: torch.dtype) -> None:
    batch = build(MIXED, block_size, dtype)
    assert_exact(batch, paged_attention_triton(**vars(batch)))


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (80, 1), (96, 7), (256, 2)])
def test_other_head_dims_match_the_reference(head_dim: int, group: int) -> None:
    batch = build([(70, 1), (3, 20), (130, 1)], 16, torch.float16, head_dim, group)
    assert_exact(batch, paged_attention_triton(**vars(batch)))


@pytest.mark.parametrize("programs_per_sm", [1, 20], ids=["splits one by one", "splits side by side"])
def test_token_has_the_same_bits_alone_and_in_its_prompt(programs_per_sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(invariant, "PROGRAMS_PER_SM", programs_per_sm)
    batch = build([(0, 150)], 16, torch.float32, group=1)
    whole = paged_attention_triton(**vars(batch), one_kernel=True)
    assert_exact(batch, whole)
    for token in (0, 63, 64, 149):
        alone = vars(batch) | {
            "query": batch.query[token : token + 1],
            "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
            "seq_lens": torch.tensor([token + 1], dtype=torch.int32),
            "max_query_len": 1,
            "max_seq_len": token + 1,
        }
        assert torch.equal(paged_attention_triton(**alone, one_kernel=True)[0], whole[token])


def test_missing_scales_change_the_result() -> None:
    batch = build([(70, 1), (3, 20)], 16, torch.float32)
    output = paged_attention_triton(**(vars(batch) | {"kv_scales": KVScales()}))
    assert not measure_error(output, exact_attention(batch), TOLERANCE[output.dtype]).passed


def stored_pools(qkv: torch.Tensor, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pools of the kernel and of the reference, for 4 tokens of 2 KV heads with identity rotation."""
    table = torch.cat((torch.ones(4, 16), torch.zeros(4, 16)), dim=1)
    pools = []
    for operation in (rotate_and_store_triton, rotate_and_store_reference):
        pool = torch.zeros(6, 3, 2, 2, 8, 32).to(E4M3)
        slots, positions = torch.tensor([9, -1, 40, 7]), torch.tensor([3, 2, 0, 1])
        caches = pool[:, 1, 0], pool[:, 1, 1]
        operation(RotaryInput(qkv.clone(), positions, table, *caches, slots, kv_scales=scales))
        pools.append(pool.float())
    return pools[0], pools[1]


def test_stored_values_are_scaled_and_rounded() -> None:
    qkv = torch.randn(4, 4 + 2 * 2, 32, generator=torch.Generator().manual_seed(2)) * 8
    found, expected = stored_pools(qkv, SCALES)
    carried = (expected == 2 * found) & (expected != 0)  # see the module docstring
    assert carried.float().mean() < 0.01
    assert torch.equal(found[~carried], expected[~carried])
    # One block of a token each, keys and values of two heads, three tokens stored.
    assert int((expected != 0).any(-1).sum()) == 3 * 2 * 2


@pytest.mark.filterwarnings("ignore:invalid value")  # from numpy, for inf * 0 in masked lanes
def test_too_large_values_saturate() -> None:
    qkv = torch.full((4, 8, 32), 1e6)
    qkv[:, -1] = -torch.inf
    found, expected = stored_pools(qkv, KVScales())
    assert torch.equal(found, expected)
    assert (float(found.max()), float(found.min())) == (448.0, -448.0)


def test_widened_cache_holds_the_blocks_of_prompts() -> None:
    batch = build([(63, 1), (27, 10), (0, 0), (3, 40)], 16, torch.float16)
    lengths = batch.query_start_loc, batch.seq_lens
    widened = WidenedBlocks(batch.block_tables, *lengths, batch.max_seq_len, 16)
    caches = widened.caches(batch.key_cache, batch.value_cache)
    for sequence, (_, new) in enumerate([(63, 1), (27, 10), (0, 0), (3, 40)]):
        for index in range(-(-int(batch.seq_lens[sequence]) // 16)):
            stored, place = int(batch.block_tables[sequence, index]), int(widened.block_tables[sequence, index])
            for cache, found in zip((batch.key_cache, batch.value_cache), caches, strict=True):
                # Unwritten elements are NaN; the interpreter reads an e4m3 NaN as 480.
                expected = cache[stored].half().nan_to_num(480.0).abs()
                assert torch.equal(found[place].abs(), expected) if new > 1 else bool(found[place].isnan().all())
    # The widened cache has the head layout of the reference.
    prompts = dataclasses.replace(batch, key_cache=caches[0], value_cache=caches[1], block_tables=widened.block_tables)
    rows = slice(1, 11)
    torch.testing.assert_close(exact_attention(prompts)[rows], exact_attention(batch)[rows], rtol=0, atol=0)
