"""The Triton token mask against its reference, bit for bit."""

import pytest
import torch

from kernels.token_bitmask import apply_token_bitmask_reference
from kernels.token_bitmask_triton import apply_token_bitmask_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1024, 1100])
def test_token_bitmask_equals_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randn(5, vocab_size + 8, generator=generator).to(dtype)  # rows are strided
    num_words = -(-vocab_size // 32)
    masks = torch.randint(-(2**31), 2**31, (3, num_words), dtype=torch.int32, generator=generator)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    expected, found = wide.clone(), wide.clone()
    apply_token_bitmask_reference(expected[:, :vocab_size], rows, masks)
    apply_token_bitmask_triton(found[:, :vocab_size], rows, masks)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, vocab_size:], wide[:, vocab_size:])
    assert torch.equal(found[[1, 3]], wide[[1, 3]])
