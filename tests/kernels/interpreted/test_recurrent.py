"""The Triton kernels of recurrent layers equal torch in float64, and cuts of prompts change no bit."""

from dataclasses import replace

import pytest
import torch

from kernels.recurrent import recurrence
from kernels.recurrent.triton_kernels import TritonRecurrent
from tests.kernels.recurrent_cases import SHAPES, check, check_chunks, check_chunks_of_64, check_drafts, check_mamba

MANY = "decodes of many sequences"  # 256 programs: slow here


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in SHAPES if name != MANY), ("prompts beside a decode", torch.float16)],
)
def test_operators_equal_torch_in_float64(name: str, dtype: torch.dtype) -> None:
    check(TritonRecurrent(), SHAPES[name], dtype)
    check_mamba(TritonRecurrent(), SHAPES[name], dtype)


def test_decodes_of_many_sequences_equal_torch_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "_DECODE_PROGRAMS", 8)
    few = replace(SHAPES[MANY], lengths=(1,) * 4, blocks=(1, 2, 3, 4))
    check(TritonRecurrent(), few, torch.float32)
    check_mamba(TritonRecurrent(), few, torch.float32)


def test_prompts_token_by_token_equal_torch_in_float64() -> None:
    check(TritonRecurrent(is_deterministic=True), SHAPES["prompts cut anywhere"], torch.float32)


def test_deterministic_chunks_change_no_bit() -> None:
    check_chunks(TritonRecurrent(is_deterministic=True), torch.float32)


def test_cuts_at_multiples_of_64_change_no_bit() -> None:
    check_chunks_of_64(TritonRecurrent(), torch.float32)


def test_wrong_drafts_change_no_bit() -> None:
    check_drafts(TritonRecurrent(is_deterministic=True), torch.float32)
