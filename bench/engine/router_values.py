"""Seeded router weights, so that two engines with random weights spread tokens over experts alike.

    SEED        every expert is equally likely
    SEED:zipf   the row of the r-th expert, in a seeded order, is scaled by r ** -0.5: few experts get most tokens

The values depend on (seed, layer) only. A peer's script has the same function.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KINDS = ("uniform", "zipf")


@dataclass(frozen=True, slots=True)
class RouterValues:
    """The weights of all routers of a model."""

    seed: int
    kind: str = "uniform"

    @classmethod
    def parse(cls, text: str) -> "RouterValues":
        """Return the values for SEED or SEED:KIND.

        Raises:
            ValueError: If the seed is not a number >= 0, or the kind is unknown.
        """
        seed, _, kind = text.partition(":")
        if not seed.isdecimal() or (kind or KINDS[0]) not in KINDS:
            raise ValueError(
                f"expected SEED or SEED:KIND with a seed >= 0 and a kind of {', '.join(KINDS)}, not {text!r}"
            )
        return cls(int(seed), kind or KINDS[0])

    def weight(self, layer: int, num_experts: int, hidden: int) -> NDArray[np.float32]:
        """Return the weight of a layer's router, [E, H], float32."""
        generator = np.random.default_rng((self.seed, layer))
        rows = generator.standard_normal((num_experts, hidden), dtype=np.float32) * np.float32(hidden**-0.5)
        if self.kind == "zipf":
            ranks = generator.permutation(num_experts) + 1
            rows *= ranks.astype(np.float32)[:, None] ** np.float32(-0.5)
        return rows
