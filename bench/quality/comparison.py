"""Compare two sides that scored the same tokens."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scored:
    """lm-eval's `word_perplexity`, and per window of tokens: the top token after each, and its own log-probability."""

    word_perplexity: float
    words: int
    windows: dict[tuple[int, ...], tuple[list[int], list[float]]]

    @classmethod
    def of(cls, found: dict[str, Any]) -> "Scored":
        windows = {tuple(one["token_ids"]): (one["likeliest"], one["log_probabilities"]) for one in found["windows"]}
        return cls(found["word_perplexity"], found["words"], windows)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))


def change(scored: Scored, reference: Scored) -> float:
    """Return the relative change of the word perplexity; 0.01 is 1 % worse than the reference."""
    return scored.word_perplexity / reference.word_perplexity - 1


def deviation_of_change(scored: Scored, reference: Scored) -> float:
    """Return the standard deviation of change() over other texts of as many tokens.

    Tokens are assumed independent: the change is a mean of differences, because both sides score the same tokens.
    """
    pairs = zip(_scores(reference, reference), _scores(scored, reference), strict=True)
    differences = [exact - other for exact, other in pairs]
    mean = math.fsum(differences) / len(differences)
    variance = math.fsum((difference - mean) ** 2 for difference in differences) / (len(differences) - 1)
    return math.sqrt(variance * len(differences)) / scored.words


def same_likeliest(scored: Scored, reference: Scored) -> float:
    """Return the share of positions with the same top token."""
    same = 0
    for token_ids, (expected, _) in reference.windows.items():
        same += sum(one == other for one, other in zip(scored.windows[token_ids][0], expected, strict=True))
    return same / reference.tokens


def _scores(scored: Scored, order: Scored) -> list[float]:
    """Return scores in the window order of `order`, without each window's last token, which some sides omit."""
    if scored.windows.keys() != order.windows.keys():
        raise ValueError("the two sides scored different windows")
    return [
        score for token_ids in order.windows for score in scored.windows[token_ids][1][: max(0, len(token_ids) - 1)]
    ]
