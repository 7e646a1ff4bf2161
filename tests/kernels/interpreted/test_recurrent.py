"""The Triton kernels of recurrent layers equal torch in float64, and cuts of prompts change no bit."""

import pytest
import torch

from kernels.recurrent.triton_kernels import TritonRecurrent
from tests.kernels.recurrent_cases import SHAPES, check, check_chunks, check_chunks_of_64, check_drafts, check_mamba


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in SHAPES), ("prompts beside a decode", torch.float16)]
)
def test_operators_equal_torch_in_float64(name: str, dtype: torch.dtype) -> None:
    check(TritonRecurrent(), SHAPES[name], dtype)
    check_mamba(TritonRecurrent(), SHAPES[name], dtype)


def test_prompts_token_by_token_equal_torch_in_float64() -> None:
    check(TritonRecurrent(is_deterministic=True), SHAPES["prompts cut anywhere"], torch.float32)


def test_deterministic_chunks_change_no_bit() -> None:
    check_chunks(TritonRecurrent(is_deterministic=True), torch.float32)


def test_cuts_at_multiples_of_64_change_no_bit() -> None:
    check_chunks_of_64(TritonRecurrent(), torch.float32)


def test_wrong_drafts_change_no_bit() -> None:
    check_drafts(TritonRecurrent(is_deterministic=True), torch.float32)
