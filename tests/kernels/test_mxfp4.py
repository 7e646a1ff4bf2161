"""MXFP4 weights of experts: packing keeps every value, and unsupported tensors are refused."""

import pytest
import torch

from kernels.moe.mxfp4 import pack_mxfp4
from kernels.moe.weights import stacked

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def random_blocks(rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, rows, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(62, 189, (3, rows, inputs // 32), dtype=torch.uint8, generator=generator)


def exact(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2).long()
    values = torch.where(nibbles >= 8, -1.0, 1.0) * E2M1[nibbles & 7]
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, 2)


@pytest.mark.parametrize(("rows", "inputs", "is_gated"), [(64, 64, False), (192, 320, False), (256, 128, True)])
def test_packed_mxfp4_weight_is_exact(rows: int, inputs: int, is_gated: bool) -> None:
    blocks, scales = random_blocks(rows, inputs)
    packed = pack_mxfp4(blocks, scales, is_gated)
    assert packed.shape == (3, rows, inputs)
    assert torch.equal(packed.exact_weight().float(), exact(blocks, scales))
    assert packed.values.nbytes + packed.scales.nbytes == blocks.nbytes + scales.nbytes


def test_tiny_mxfp4_scales_become_zeros() -> None:
    blocks, scales = random_blocks(64, 64)
    scales[0, 0, 1] = 61
    found = pack_mxfp4(blocks, scales, is_gated=False).exact_weight().float()
    expected = exact(blocks, scales)
    expected[0, 0, 32:] = 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "inputs", "is_gated"), [(96, 64, False), (64, 96, False), (192, 64, True)])
def test_uneven_mxfp4_sizes_are_refused(rows: int, inputs: int, is_gated: bool) -> None:
    with pytest.raises(ValueError, match="multiples"):
        pack_mxfp4(*random_blocks(rows, inputs), is_gated)


def test_large_mxfp4_scales_are_refused() -> None:
    blocks, scales = random_blocks(64, 64)
    scales[1, 2, 0] = 189
    with pytest.raises(ValueError, match="largest supported"):
        pack_mxfp4(blocks, scales, is_gated=False)


def test_stacked_puts_gate_rows_before_up_rows() -> None:
    assert stacked(torch.arange(12).view(2, 6)).tolist() == [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]
