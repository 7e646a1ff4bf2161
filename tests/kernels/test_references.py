"""The references against torch's own operators: they are the specification, so somebody else must agree with them.
Without a GPU the operations themselves are called: CPU tensors mean the reference."""

import torch
from torch.nn import functional

from bench.kernel.cases import HeadShape, attention_batch, exact_attention, measure_error
from kernels.attention.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.silu_and_mul import silu_and_mul
from kernels.token_bitmask import apply_token_bitmask


def test_paged_attention_is_scaled_dot_product_attention_over_the_gathered_blocks() -> None:
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


def test_the_chunked_float64_reference_equals_the_plain_one() -> None:
    batch = attention_batch(HeadShape(2, 1, 16), 8, [(5, 30), (9, 1)], torch.float64, torch.Generator().manual_seed(0))
    # Float64 sums in another order.
    in_chunks = exact_attention(batch, chunk_tokens=7)
    torch.testing.assert_close(in_chunks, paged_attention(**vars(batch)), rtol=1e-12, atol=1e-12)


def test_rms_norm_is_torchs() -> None:
    x, residual, weight = torch.randn(3, 4, 40, generator=torch.Generator().manual_seed(0)).unbind()
    torch.testing.assert_close(rms_norm(x, weight[0], 1e-5), functional.rms_norm(x, (40,), weight[0], 1e-5))
    normed, new_residual = add_rms_norm(x, residual, weight[0], 1e-5)
    torch.testing.assert_close(normed, functional.rms_norm(x + residual, (40,), weight[0], 1e-5))
    assert torch.equal(new_residual, x + residual)


def test_silu_and_mul_takes_the_gate_from_the_first_half() -> None:
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


def test_a_token_bitmask_forbids_the_tokens_whose_bit_is_0() -> None:
    scores = torch.arange(80.0).repeat(3, 1)
    masks = torch.tensor([[1 << 0 | 1 << 5, -(2**31), 1 << 15], [-1, -1, -1]], dtype=torch.int32)
    apply_token_bitmask(scores, torch.tensor([2, 0], dtype=torch.int32), masks)
    assert torch.equal(scores[:2], torch.arange(80.0).repeat(2, 1))
    assert scores[2].isfinite().nonzero().flatten().tolist() == [0, 5, 63, 79]
