"""Norms fused with the preceding sum over ranks: used only after a self-test, with the same values as sum then norm."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_worker.model.tensor_parallel import ProcessGroup, TensorParallel
from kernels.rms_norm import add_rms_norm_reference
from kernels.scaled import Scaled
from tests.engine_worker.model.ranks import Ranks
from tests.engine_worker.model.test_tensor_parallel import CASES, SHAPE, three_steps

pytestmark = pytest.mark.tp


class Rows:
    """Fused sum and norm of up to four rows, by gathering; `error` is added to one rank's sum."""

    def __init__(self, ranks: TensorParallel, error: float = 0.0, fails: bool = False) -> None:
        self.ranks, self.error, self.fails, self.calls = ranks, error, fails, 0
        self.waits_for_ever = False

    def serves(self, part: Tensor) -> bool:
        return 0 < len(part) <= 4

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self.calls += 1
        summed = self.ranks.all_reduce_in_order(part.clone()).add_(self.error)
        if self.fails:
            raise MemoryError("a compiler has none")
        return add_rms_norm_reference(summed, residual, weight, eps)

    def add_rms_norm_quantized(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, is_grouped: bool, keeps_plain: bool
    ) -> tuple[Scaled, Tensor]:
        raise NotImplementedError("of GPUs")

    def wait_forever(self) -> None:
        self.waits_for_ever = True


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


def self_test(ranks: ProcessGroup, error: float, fails: bool) -> tuple[bool, bool, bool]:
    """Return whether the self-test passes, whether the fused norm is used, and whether it then waits forever."""
    other = ProcessGroup(torch.device("cpu"))
    rows = Rows(ranks, *((error, fails) if ranks.rank == 1 else ()))
    return other.norm_by(rows, 96), other.peer_norm is rows, rows.waits_for_ever


@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize(
    ("error", "fails", "is_taken"),
    [(0.0, False, True), (2.0**-6, False, False), (float("nan"), False, False), (0.0, True, False)],
)
def test_fused_norm_is_used_when_all_ranks_pass_the_test(
    ranks: Ranks, size: int, error: float, fails: bool, is_taken: bool
) -> None:
    assert ranks.run(size, self_test, error, fails) == [(is_taken,) * 3] * size


def none_on_rank_1(ranks: ProcessGroup) -> tuple[bool, bool]:
    other = ProcessGroup(torch.device("cpu"))
    return other.norm_by(None if ranks.rank == 1 else Rows(ranks), 96), other.peer_norm is None


def test_fused_norm_is_off_when_one_rank_lacks_it(ranks: Ranks) -> None:
    assert ranks.run(3, none_on_rank_1) == [(False, True)] * 3


def answers(
    ranks: ProcessGroup, config: dict[str, Any], at_once: bool, is_deterministic: bool
) -> tuple[list[Tensor], int]:
    """Return the logits of three steps and the number of fused norms."""
    rows = Rows(ranks)
    ranks.peer_norm = rows if at_once else None
    try:
        return three_steps(ranks, config, is_deterministic), rows.calls
    finally:
        ranks.peer_norm = None


# Two layers have four sums per step; the prompt has too many rows. A callback adds one norm of the last layer.
@pytest.mark.parametrize(("model_type", "calls"), [("llama", 4 + 5), ("qwen3", 9), ("phi3", 9), ("gemma2", 0)])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_fused_sum_norm_changes_no_logits(ranks: Ranks, model_type: str, calls: int, is_deterministic: bool) -> None:
    config = {**SHAPE, "model_type": model_type, "num_key_value_heads": 6, **CASES[model_type]}
    by_ranks = ranks.run(3, answers, config, False, is_deterministic)
    at_once = ranks.run(3, answers, config, True, is_deterministic)
    for (expected, none), (found, num_calls) in zip(by_ranks, at_once, strict=True):
        assert none == 0
        # An ordered 16-bit sum of three parts rounds differently, so a row would not be the same in every batch.
        assert num_calls == (0 if is_deterministic else calls)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


def test_deterministic_sums_of_two_ranks_use_fused_norm(ranks: Ranks) -> None:
    config = {**SHAPE, "model_type": "llama", "num_key_value_heads": 6}
    assert [calls for _, calls in ranks.run(2, answers, config, True, True)] == [9, 9]
