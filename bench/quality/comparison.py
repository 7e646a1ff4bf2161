"""Two sides that scored the same tokens, beside each other. Knows neither how they were asked nor who they are."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scored:
    """`word_perplexity` as lm-eval has it; a window's tokens, the likeliest behind each, and what its own got."""

    word_perplexity: float
    words: int
    windows: dict[tuple[int, ...], tuple[list[int], list[float]]]

    @classmethod
    def of(cls, told: dict[str, Any]) -> "Scored":
        windows = {tuple(one["token_ids"]): (one["likeliest"], one["log_probabilities"]) for one in told["windows"]}
        return cls(told["word_perplexity"], told["words"], windows)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))


def change(scored: Scored, reference: Scored) -> float:
    """A change of the word perplexity: 0.01 is 1 % worse than the reference."""
    return scored.word_perplexity / reference.word_perplexity - 1


def deviation_of_change(scored: Scored, reference: Scored) -> float:
    """Its standard deviation, as far as another text of as many tokens would give another change.

    Tokens are taken as independent: the change is a mean of their differences, since both sides have the same ones.
    """
    pairs = zip(_scores(reference, reference), _scores(scored, reference), strict=True)
    differences = [exact - other for exact, other in pairs]
    mean = math.fsum(differences) / len(differences)
    variance = math.fsum((difference - mean) ** 2 for difference in differences) / (len(differences) - 1)
    return math.sqrt(variance * len(differences)) / scored.words


def same_likeliest(scored: Scored, reference: Scored) -> float:
    """The share of tokens behind which both expect the same one."""
    same = 0
    for token_ids, (expected, _) in reference.windows.items():
        same += sum(one == other for one, other in zip(scored.windows[token_ids][0], expected, strict=True))
    return same / reference.tokens


def _scores(scored: Scored, order: Scored) -> list[float]:
    """In the windows' order of `order`. Without those of a window's last token, which not every side tells."""
    if scored.windows.keys() != order.windows.keys():
        raise ValueError("the two sides scored different windows")
    return [
        score for token_ids in order.windows for score in scored.windows[token_ids][1][: max(0, len(token_ids) - 1)]
    ]
