"""Log-probabilities by the Triton kernel against float64, and the greatest scores by groups against a sort."""

import math

import pytest
import torch

from kernels.sampling import log_normalizers_triton as kernel
from kernels.sampling.log_normalizers import log_normalizers_reference, top_scores


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_log_normalizers_equal_float64(vocab_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_TILE", 64)
    generator = torch.Generator().manual_seed(vocab_size)
    wide = (9 * torch.randn(4, vocab_size + 8, generator=generator)).to(dtype)
    scores = wide[:, :vocab_size]
    scores[1, : vocab_size // 2] = -math.inf
    exact = scores.double().logsumexp(-1) - scores.double().amax(-1)
    for best, log_sums in (kernel.log_normalizers_triton(scores), log_normalizers_reference(scores)):
        assert torch.equal(best, scores.float().amax(-1))
        assert torch.allclose(log_sums.double(), exact, atol=2e-6)  # float32 sums of up to 300 terms


@pytest.mark.parametrize("count", [1, 5, 20])
def test_top_scores_by_groups_are_those_of_a_sort(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    scores = torch.randint(40, (6, 128 * 50), generator=generator).float()  # with many ties
    scores[0] = torch.randn(128 * 50, generator=generator)
    values, token_ids = top_scores(scores, count)
    assert torch.equal(values, scores.sort(dim=-1, descending=True).values[:, :count])
    assert torch.equal(scores.gather(1, token_ids), values)
    assert all(len(set(row)) == count for row in token_ids.tolist())
