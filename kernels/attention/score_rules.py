"""The rules of a layer for attention scores besides the causal mask: window, softcap and sinks.

A rule that a layer does not have costs no instruction.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRules:
    """Rules of one layer.

    Attributes:
        window: A query at position p sees keys p - window + 1 to p, as transformers' `sliding_window`; 0: all up to p.
        softcap: Scaled scores become softcap * tanh(score / softcap) before the mask; 0: unchanged.
        sinks: [Hq], one logit per query head that enters the sum of weights without a value; None: no sinks.

    Raises:
        ValueError: If window or softcap is negative, or sinks is not a vector.
    """

    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window < 0 or self.softcap < 0:
            raise ValueError(f"window ({self.window}) and softcap ({self.softcap}) must be 0 (none) or more")
        if self.sinks is not None and self.sinks.dim() != 1:
            raise ValueError(f"sinks must have one dimension (query heads), not shape {tuple(self.sinks.shape)}")


NO_RULES = ScoreRules()
