"""Which experts compute which tokens, and the work list of the expert products.

A pair is a token and one of its experts, numbered token * slots + slot. Products use pairs sorted by (expert, token).
A shared expert follows the others: every token has it in its last slot.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]
Shared = Literal["none", "plain", "gated"]  # weight of the shared expert: 1, or the sigmoid of a last logit

MIN_BLOCK_ROWS = 8  # columns of the smallest wgmma
MAX_BLOCK_ROWS = 128
BLOCK_FIELDS = 4  # expert, first row, end of the expert's rows, unused: 16 bytes


@dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are chosen and weighted.

    Attributes:
        num_experts: E, without a shared expert.
        top_k: Experts per token, without a shared expert.
        scoring: Scores from logits; `softmax_of_chosen` is a softmax over the chosen experts only.
        renormalize: Divide the weights by their sum.
        scale: Factor of the weights.
        num_groups: Groups of consecutive experts of equal size.
        num_chosen_groups: Experts are chosen in the groups with the largest sums of their two best scores.
        shared: Whether the shared expert is routed too, as expert E.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    shared: Shared = "none"

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts:
            raise ValueError(f"top_k: {self.top_k}; use 1 to num_experts ({self.num_experts})")
        if self.num_experts % self.num_groups or not 0 < self.num_chosen_groups <= self.num_groups:
            raise ValueError(
                f"num_groups: {self.num_groups} with {self.num_chosen_groups} chosen; use a divisor of"
                f" {self.num_experts} and at most as many chosen groups"
            )
        if self.num_chosen_groups * (self.num_experts // self.num_groups) < self.top_k:
            raise ValueError(f"num_chosen_groups: {self.num_chosen_groups} groups have fewer than {self.top_k} experts")

    @property
    def divides_by_chosen(self) -> bool:
        """Return whether the weights of the chosen experts sum to `scale`."""
        return self.renormalize or self.scoring == "softmax_of_chosen"

    @property
    def num_shared(self) -> int:
        """Return 1 with a shared expert, otherwise 0."""
        return int(self.shared != "none")

    @property
    def num_logits(self) -> int:
        """Return the rows of the router's weight: E, and one for the gate of the shared expert."""
        return self.num_experts + int(self.shared == "gated")


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of T tokens, on the device, with k slots each. All shapes depend on T only.

    Attributes:
        ids: [T, k], int32, ascending in each row.
        weights: [T, k], float32.
        pairs: [T * k], int32, pairs sorted by (expert, token).
        offsets: [E + 1], int32, first sorted row of each expert; E includes a shared one.
        positions: [T, k], int32, sorted row of each pair: the inverse of `pairs`.
        blocks: [B, 4], int32: owned expert, first sorted row, end of the expert's rows, unused.
        num_blocks: [1], int32, used rows of `blocks`.
        block_rows: Maximum sorted rows per block.
        owned: Experts that this rank computes.
    """

    ids: Tensor
    weights: Tensor
    pairs: Tensor
    offsets: Tensor
    positions: Tensor
    blocks: Tensor
    num_blocks: Tensor
    block_rows: int
    owned: range

    @property
    def num_pairs(self) -> int:
        return self.ids.numel()


def block_rows_of(num_tokens: int, router: Router) -> int:
    """Return the rows per block: a power of two, at least the number of tokens up to 16.

    For more tokens, at least twice the mean number of rows per expert: few experts need a second block then.
    """
    wanted = num_tokens if num_tokens <= 16 else 2 * num_tokens * router.top_k // router.num_experts
    return min(max(MIN_BLOCK_ROWS, 1 << max(wanted - 1, 0).bit_length()), MAX_BLOCK_ROWS)


def empty_routing(x: Tensor, router: Router, owned: range | None) -> Routing:
    """Allocate the uninitialized routing of x [T, ...]."""
    num_tokens, num_slots = len(x), router.top_k + router.num_shared
    num_chosen, block_rows = num_tokens * router.top_k, block_rows_of(num_tokens, router)
    max_blocks = min(num_chosen, router.num_experts) + router.num_shared * -(-num_tokens // block_rows)
    if num_tokens > block_rows:
        max_blocks += num_chosen // block_rows
    num_experts = router.num_experts + router.num_shared

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    return Routing(
        ids=empty(num_tokens, num_slots),
        weights=empty(num_tokens, num_slots, dtype=torch.float32),
        pairs=empty(num_tokens * num_slots),
        offsets=empty(num_experts + 1),
        positions=empty(num_tokens, num_slots),
        blocks=empty(max_blocks, BLOCK_FIELDS),
        num_blocks=empty(1),
        block_rows=block_rows,
        owned=range(num_experts) if owned is None else owned,
    )
