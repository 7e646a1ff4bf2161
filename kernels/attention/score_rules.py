"""The rules of a layer for scores beside the causal mask: which keys stay visible, and what becomes of a score.

    ScoreRules(window, softcap, sinks)      0, 0 and None: there is no such rule, and it costs no instruction
    NO_RULES                                none of them: the causal mask alone

window    a query at position p sees the keys p - window + 1 .. p, as transformers' `sliding_window`; 0: all up to p
softcap   scores, scaled, become softcap * tanh(score / softcap) before the mask
sinks     [Hq], a logit of each query head beside its scores: it enlarges the sum of weights, without a value

On a block's walk, where a layer reads it: the reference, the kernels and the plan of a CPU take the rules as they are.
It knows no kernel.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRules:
    """Raises ValueError for a negative window or softcap, and for sinks that are no vector."""

    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window < 0 or self.softcap < 0:
            raise ValueError(f"a window ({self.window}) and a softcap ({self.softcap}) are 0 or more; 0 is none")
        if self.sinks is not None and self.sinks.dim() != 1:
            raise ValueError(f"sinks: a number for each query head, not a tensor {tuple(self.sinks.shape)}")


NO_RULES = ScoreRules()
