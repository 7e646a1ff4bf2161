"""Linear layers split over ranks: a LinearMethod that wraps another one.

Layers split by outputs need no communication. Layers split by inputs sum the ranks' partial results, unless the next
norm does. The output head is split by tokens, and rank 0 gathers the logits.
"""

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.linear import (
    Experts,
    ExpertsLoad,
    Head,
    Input,
    Linear,
    LinearMethod,
    LinearSpec,
    Split,
)
from engine_worker.model.sharding import padded_head_rows
from engine_worker.model.specs.mlp import GateSpec
from engine_worker.model.tensor_parallel import TensorParallel
from engine_worker.model.weights import WeightSource
from kernels.scaled import Scaling


class ReducedOver:
    """A linear layer split by inputs, followed by an all-reduce."""

    def __init__(self, linear: Linear, all_reduce: Callable[[Tensor], Tensor]) -> None:
        self._linear, self._all_reduce = linear, all_reduce

    @property
    def scaling(self) -> Scaling:
        return self._linear.scaling

    def __call__(self, x: Input) -> Tensor:
        return self._all_reduce(self._linear(x))

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Input:
        raise NotImplementedError("gated layers are split by outputs")


class VocabParallelHead:
    """The output head of one rank's tokens."""

    def __init__(self, head: Head, ranks: TensorParallel, vocab_size: int) -> None:
        self._head, self._ranks, self._vocab_size = head, ranks, vocab_size

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """Return logits [N, V] on rank 0, the rank's own columns on the others."""
        return self._ranks.gather_logits(self._head(x), self._vocab_size, logits)


class ParallelMethod:
    """A LinearMethod for one of several ranks."""

    def __init__(
        self, method: LinearMethod, ranks: TensorParallel, vocab_size: int, is_deterministic: bool = False
    ) -> None:
        self._method, self._ranks, self._vocab_size = method, ranks, vocab_size
        self._all_reduce = ranks.all_reduce_in_order if is_deterministic else ranks.all_reduce

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        if spec.split is Split.OUTPUTS:
            return self._method.load(spec, source)
        partial = replace(spec, bias=spec.bias and self._ranks.rank == 0)  # the bias is added once
        linear = self._method.load(partial, source)
        return ReducedOver(linear, self._all_reduce) if spec.is_summed else linear

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        """Load this rank's part; layers of the same experts add the bias of down once."""
        has_all_columns = load.spec.owned is not None
        partial = replace(load, has_down_bias=load.has_down_bias and (has_all_columns or self._ranks.rank == 0))
        return self._method.experts(partial, source)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        """Make the head of the rank's rows, padded so that all ranks compute equally many."""
        missing = padded_head_rows(self._vocab_size, self._ranks.size) - len(weight)
        padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        return VocabParallelHead(self._method.head(padded, name, source), self._ranks, self._vocab_size)
