"""The references against torch's own operators, which verifies the specification of the kernels.

The operations themselves are called, since CPU tensors select the reference.
"""

from typing import Any

import pytest
import torch
from torch.nn import functional

from bench.kernel.cases import HeadShape, attention_batch, exact_attention, measure_error
from kernels.attention.paged_attention import paged_attention
from kernels.attention.score_rules import ScoreRules
from kernels.moe.choice import choose
from kernels.moe.routing import Router
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.scaled import quantize_groups_reference
from kernels.silu_and_mul import silu_and_mul
from kernels.token_bitmask import apply_token_bitmask


def test_paged_reference_equals_sdpa_on_gathered_blocks() -> None:
    shape, lengths = HeadShape(6, 2, 32), [(0, 9), (20, 1), (0, 0), (7, 5)]
    batch = attention_batch(shape, 8, lengths, torch.float32, torch.Generator().manual_seed(0))
    output, starts = paged_attention(**vars(batch)), batch.query_start_loc.tolist()
    for sequence, (cached, new) in enumerate(lengths):
        positions = torch.arange(cached + new)
        blocks = batch.block_tables[sequence, positions // 8]
        keys, values = (cache[blocks, :, positions % 8] for cache in (batch.key_cache, batch.value_cache))
        expected = functional.scaled_dot_product_attention(
            batch.query[starts[sequence] : starts[sequence + 1]].transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=positions <= positions[cached:, None],
            enable_gqa=True,
        )
        torch.testing.assert_close(output[starts[sequence] : starts[sequence + 1]], expected.transpose(0, 1))


def test_chunked_float64_reference_equals_the_plain_one() -> None:
    batch = attention_batch(HeadShape(2, 1, 16), 8, [(5, 30), (9, 1)], torch.float64, torch.Generator().manual_seed(0))
    # Float64 sums in another order.
    in_chunks = exact_attention(batch, chunk_tokens=7)
    torch.testing.assert_close(in_chunks, paged_attention(**vars(batch)), rtol=1e-12, atol=1e-12)


def test_rms_norm_reference_equals_torch() -> None:
    x, residual, weight = torch.randn(3, 4, 40, generator=torch.Generator().manual_seed(0)).unbind()
    torch.testing.assert_close(rms_norm(x, weight[0], 1e-5), functional.rms_norm(x, (40,), weight[0], 1e-5))
    normed, new_residual = add_rms_norm(x, residual, weight[0], 1e-5)
    torch.testing.assert_close(normed, functional.rms_norm(x + residual, (40,), weight[0], 1e-5))
    assert torch.equal(new_residual, x + residual)


def test_silu_and_mul_gate_is_the_first_half() -> None:
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(silu_and_mul(x), functional.silu(x[:, :5]) * x[:, 5:])


def test_bf16_references_round_once() -> None:
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.rand(256, generator=torch.Generator().manual_seed(1)).bfloat16()
    half_a_unit = 0.5 * torch.finfo(torch.bfloat16).eps
    for operation in (lambda x: rms_norm(x, weight.to(x.dtype), 1e-5), silu_and_mul):
        error = measure_error(operation(x), operation(x.double()), half_a_unit)
        # Every element, not only the norm: two roundings would reach a whole eps.
        assert error.worst_ratio <= half_a_unit, error


def test_token_bitmask_forbids_tokens_with_a_zero_bit() -> None:
    scores = torch.arange(80.0).repeat(3, 1)
    masks = torch.tensor([[1 << 0 | 1 << 5, -(2**31), 1 << 15], [-1, -1, -1]], dtype=torch.int32)
    apply_token_bitmask(scores, torch.tensor([2, 0], dtype=torch.int32), masks)
    assert torch.equal(scores[:2], torch.arange(80.0).repeat(2, 1))
    assert scores[2].isfinite().nonzero().flatten().tolist() == [0, 5, 63, 79]


def transformers_mask(positions: torch.Tensor, cached: int, window: int) -> torch.Tensor:
    """Mask as `sliding_window_overlay` of transformers/masking_utils.py: keys from position - window + 1 on."""
    mask = positions <= positions[cached:, None]
    return mask & (positions > positions[cached:, None] - window) if window else mask


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(5, 0.0, False), (0, 2.0, False), (0, 0.0, True), (1, 3.0, True)]
)
def test_score_rules_match_transformers(window: int, softcap: float, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [(0, 9), (20, 1), (0, 0), (7, 5), (3, 1)]
    batch = attention_batch(HeadShape(6, 2, 32), 8, lengths, torch.float32, generator)
    sinks = torch.randn(6, generator=generator) if has_sinks else None
    starts = batch.query_start_loc.tolist()
    expected = torch.zeros(batch.query.shape)
    for sequence, (cached, new) in enumerate(lengths):
        positions = torch.arange(cached + new)
        blocks = batch.block_tables[sequence, positions // 8]
        keys, values = (
            cache[blocks, :, positions % 8].transpose(0, 1).repeat_interleave(3, dim=0)
            for cache in (batch.key_cache, batch.value_cache)
        )
        # Copied from the eager attention of transformers' gemma2 (softcap) and gpt_oss (sinks).
        scores = batch.query[starts[sequence] : starts[sequence + 1]].transpose(0, 1) @ keys.transpose(1, 2)
        scores *= batch.scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~transformers_mask(positions, cached, window), float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.reshape(-1, 1, 1).expand(-1, new, 1)], dim=-1)
        weights = scores.softmax(-1)
        weights = weights if sinks is None else weights[..., :-1]
        expected[starts[sequence] : starts[sequence + 1]] = (weights @ values).transpose(0, 1)
    # Keys before the window are not read: neither their blocks nor their block table entries.
    if window:
        for sequence, (cached, _) in enumerate(lengths):
            batch.block_tables[sequence, : max(cached - window + 1, 0) // 8] = 0
    found = paged_attention(**(vars(batch) | {"rules": ScoreRules(window, softcap, sinks)}))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rules", [{"window": -1}, {"softcap": -1.0}, {"sinks": torch.zeros(2, 2)}])
def test_invalid_score_rules_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"window|sinks"):
        ScoreRules(**rules)


def test_references_take_no_rows() -> None:
    """A step without samples has no rows in the last layer."""
    router = Router(num_experts=8, top_k=2, scoring="sigmoid", num_groups=4, num_chosen_groups=2)
    ids, weights = choose(torch.empty(0, 8), router)
    assert ids.shape == weights.shape == (0, 2)
    scaled = quantize_groups_reference(torch.empty(0, 256))
    assert (scaled.values.shape, scaled.scales.shape) == ((0, 256), (2, 0))
