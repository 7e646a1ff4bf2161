"""The Triton sampling kernels against the torch reference and the definitions in float64."""

import math

import numpy as np
import pytest
import torch

from kernels.sampling import cuda
from kernels.sampling.cuda import sample_tokens_triton, sum_groups
from kernels.sampling.reference import SamplingRows, sample_tokens_reference

pytestmark = [
    # The interpreter's numpy warns about exp, log and differences of infinities.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
VOCAB_SIZE = 300  # three groups, the last one partial
WAYS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 30.0, "top_p": 0.9},
    {"temperature": 1e-30},
    {"top_k": 1},
    {"top_k": 3},  # the groups' best scores bound the search
    {"top_k": 40},  # more than there are groups
    {"top_k": VOCAB_SIZE + 5},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiles of two groups, so that a row has several tiles."""
    monkeypatch.setattr(cuda, "_GROUPS_PER_TILE", 2)
    monkeypatch.setattr(cuda, "_FLOOR_GROUPS_PER_TILE", 2)
    monkeypatch.setattr(cuda, "_ARGMAX_TILE", 128)


def rows_of(ways: list[dict[str, float]], first_seed: int = 0) -> SamplingRows:
    def column(name: str, neutral: float) -> torch.Tensor:
        return torch.tensor([way.get(name, neutral) for way in ways], dtype=torch.float64)

    temperature, min_p, top_k, top_p = (
        column(name, neutral) for name, neutral in (("temperature", 1), ("min_p", 0), ("top_k", 0), ("top_p", 1))
    )
    random = temperature > 0
    return SamplingRows(
        seeds=torch.arange(len(ways)) + first_seed,
        indices=torch.arange(len(ways)) % 7,
        temperature=temperature,
        log_min_p=min_p.log(),
        top_k=top_k.long(),
        top_p=top_p,
        random_rows=random.nonzero().squeeze(1),
        truncated_rows=(random & ((min_p > 0) | (top_k > 0) | (top_p < 1))).nonzero().squeeze(1),
    )


def scores_of(num_rows: int, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a strided view; the columns after a row must not be read."""
    wide = torch.full((num_rows, VOCAB_SIZE + 20), torch.nan)
    generator = torch.Generator().manual_seed(0)
    wide[:, :VOCAB_SIZE] = scale * torch.randn(num_rows, VOCAB_SIZE, generator=generator)
    return wide.to(dtype)[:, :VOCAB_SIZE]


def kept_by_definition(scores: np.ndarray, way: dict[str, float]) -> np.ndarray:
    weights = np.exp((scores - scores.max()) / way.get("temperature", 1.0))
    kept = weights >= way.get("min_p", 0.0)
    top_k = int(way.get("top_k", 0))
    if 0 < top_k < len(scores):
        kept &= scores >= np.sort(scores)[-top_k]
    if (top_p := way.get("top_p", 1.0)) < 1.0:
        total = weights[kept].sum()
        kept &= [weights[kept & (scores > score)].sum() < top_p * total for score in scores]
        kept[scores.argmax()] = True
    return kept


@pytest.mark.parametrize(("scale", "dtype"), [(0.1, torch.float32), (2.0, torch.float32), (6.0, torch.float16)])
def test_sampled_tokens_match_the_reference(scale: float, dtype: torch.dtype) -> None:
    scores, rows = scores_of(len(WAYS), scale, dtype), rows_of(WAYS)
    for result, expected in zip(sample_tokens_triton(scores, rows), sample_tokens_reference(scores, rows), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("scale", [0.1, 2.0, 6.0])
def test_kept_tokens_are_exact(scale: float) -> None:
    scores, rows = scores_of(len(WAYS), scale), rows_of(WAYS)
    sums = sum_groups(scores, rows)
    for row, way in enumerate(WAYS):
        exact = scores[row].double().numpy()
        kept = kept_by_definition(exact, way)
        assert ((scores[row] >= sums.floors[row]).numpy() == kept).all(), way
        for group, start in enumerate(range(0, VOCAB_SIZE, 128)):
            part = slice(start, start + 128)
            relative = (exact[part] - exact[part].max()) / way.get("temperature", 1.0)
            mass = (np.exp(relative) * kept[part]).sum()
            assert sums.mass[row, group].item() == pytest.approx(mass, rel=1e-5), (way, group)  # fp32 sums of 128


def test_ties_at_the_threshold_are_kept_together() -> None:
    scores = torch.full((2, VOCAB_SIZE), -20.0)
    scores[:, [10, 150, 290]] = 1.0
    sums = sum_groups(scores, rows_of([{"top_k": 2}, {"top_p": 0.4}]))
    assert (scores >= sums.floors[:, None]).nonzero()[:, 1].tolist() == [10, 150, 290] * 2


def test_close_scores_around_zero_are_distinguished() -> None:
    """The search quarters an interval of floats: values next to zero are many quarterings away from 100."""
    scores = torch.full((1, VOCAB_SIZE), -100.0)
    scores[0, :4] = torch.tensor([100.0, 3e-30, 2e-30, 1e-30])
    assert sum_groups(scores, rows_of([{"top_k": 3}])).floors.tolist() == torch.tensor([2e-30]).tolist()


def test_greedy_takes_the_first_of_equal_scores() -> None:
    scores = scores_of(3, 1.0)
    scores[:, [120, 248, 299]] = 50.0  # 248 = 120 + a tile
    greedy = {"temperature": 0.0}
    for rows in (None, rows_of([greedy, {"top_p": 0.5}, greedy])):
        token_ids, best = sample_tokens_triton(scores, rows)
        assert token_ids[[0, 2]].tolist() == [120, 120]
        assert best.tolist() == [50.0] * 3


def test_invalid_rows_are_marked_and_isolated() -> None:
    scores = scores_of(5, 1.0)
    ways: list[dict[str, float]] = [{}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_k": 3}, {"min_p": 0.2}]
    healthy = sample_tokens_triton(scores, rows_of(ways))
    scores[1, 290], scores[2, 5], scores[3] = math.nan, math.inf, -math.inf
    for rows in (rows_of(ways), None):
        token_ids, best = sample_tokens_triton(scores, rows)
        assert best.isfinite().tolist() == [True, False, False, False, True]
        assert best[1].isnan() and best[2] == math.inf and best[3] == -math.inf
        assert ((token_ids >= 0) & (token_ids < VOCAB_SIZE)).all()
        if rows is not None:
            assert token_ids[[0, 4]].tolist() == healthy[0][[0, 4]].tolist()


def test_sampled_row_does_not_depend_on_the_batch() -> None:
    scores, rows = scores_of(len(WAYS), 2.0), rows_of(WAYS)
    together = sample_tokens_triton(scores, rows)[0].tolist()
    for row, way in enumerate(WAYS):
        alone = rows_of([way], first_seed=row)
        alone.indices[0] = rows.indices[row]
        assert sample_tokens_triton(scores[row : row + 1], alone)[0].tolist() == together[row : row + 1]


def test_draws_follow_the_exact_distribution() -> None:
    """Chi-square against the exact probabilities of 8 tokens in 3 groups, alpha = 0.001; the seeds are fixed."""
    num_draws, tokens = 150, [3, 60, 127, 128, 200, 256, 257, 299]
    scores = torch.full((1, VOCAB_SIZE), -1e4)
    scores[0, tokens] = torch.tensor([1.0, 0.2, -0.5, 0.7, 0.0, 0.3, 0.9, -0.2])
    token_ids, _ = sample_tokens_triton(scores.expand(num_draws, -1), rows_of([{}] * num_draws))
    expected = scores[0, tokens].double().softmax(dim=-1).numpy() * num_draws
    observed = np.bincount(token_ids.numpy(), minlength=VOCAB_SIZE)
    assert observed[tokens].sum() == num_draws
    statistic = ((observed[tokens] - expected) ** 2 / expected).sum()
    assert statistic < 24.32  # chi-square at 0.999 with 7 degrees of freedom
