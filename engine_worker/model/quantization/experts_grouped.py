"""Experts on a CPU whose weights are in groups of 32 inputs: in one C++ call, or for many tokens in a loop.

Both have the same bits, so a token's do not depend on its batch.
"""

import logging
from functools import cache

from torch import Tensor

from engine_worker.model.linear import NOTHING_QUANTIZED, Experts, ExpertsLoad, Input, LinearMethod
from engine_worker.model.quantization.experts_cpu import LoopedExperts, load_experts, log_loop
from engine_worker.model.quantization.grouped_linear import GroupedLinear, gate_of
from engine_worker.model.specs.experts import RouterSpec
from engine_worker.model.weights import WeightSource
from kernels.cpu.build import NoLibrary
from kernels.cpu.experts import MAX_CHOSEN, MAX_EXPERTS, PackedExperts, check_experts
from kernels.cpu.library import InstructionSet, cpu_library
from kernels.cpu.linear import PackedLinear
from kernels.cpu.step import DTYPES
from kernels.scaled import Scaling

logger = logging.getLogger("worker")

# Of one call: 0.6 of the loop's time for 32 tokens, 0.7 to 0.95 for 512 (AVX2).
_MAX_TOKENS = 512
# With AVX-512, a loop multiplies larger tiles (csrc/linear_avx512.cpp). One call takes 0.6 of its time for 1 to 4 rows
# of an expert, 0.9 for 8; with 8 bits, 1.03 for 12 and 1.3 for 32.
_ROWS_OF_TILES = 10


def load_grouped_experts(load: ExpertsLoad, source: WeightSource, method: LinearMethod) -> Experts:
    """Load the experts with the linear layers of `method`; in a loop if C++ does not serve them.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    return in_one_call(load, load_experts(load, source, method))


def in_one_call(load: ExpertsLoad, looped: LoopedExperts) -> Experts:
    """Return experts that compute what `looped` does in one call, or `looped` if C++ does not serve it."""
    packed = _packed(load, looped)
    if packed is None:
        log_loop()
        return looped
    return GroupedExperts(packed, looped, _max_tokens(load.spec.router))


def _max_tokens(router: RouterSpec) -> int:
    if cpu_library().instruction_set is InstructionSet.AVX2:
        return _MAX_TOKENS
    return min(_MAX_TOKENS, _ROWS_OF_TILES * router.num_experts // router.top_k)


class GroupedExperts:
    """The experts of one layer."""

    scaling = Scaling.NONE

    def __init__(self, packed: PackedExperts, looped: LoopedExperts, max_tokens: int) -> None:
        """Use one call for steps of at most `max_tokens`."""
        self._packed, self._looped, self._max_tokens = packed, looped, max_tokens
        self.has_shared = looped.has_shared

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        logits = self._looped.logits(x)
        if len(x) <= self._max_tokens and x.dtype in DTYPES:
            return self._packed(x, logits)
        return self._looped.weighted_sum(x, *self._packed.choose(logits))


def _packed(load: ExpertsLoad, looped: LoopedExperts) -> PackedExperts | None:
    router, gate = looped.router, load.spec.gate
    experts = [_pair(*pair) for pair in looped.experts]
    there = [pair for pair in experts if pair is not None]
    formats = {(first.format, down.format) for first, down in there}
    is_small = router.num_experts + router.num_shared <= MAX_EXPERTS and router.top_k <= MAX_CHOSEN
    if gate is None or router.num_groups > 1 or not is_small:
        return None
    if len(there) < len(experts) or len(formats) != 1 or not _is_right():
        return None
    form, limits = gate_of(gate)
    correction = load.router.correction_bias
    return PackedExperts(router, there, form, load.spec.experts.start, correction=correction, limits=limits)


def _pair(first: object, down: object) -> tuple[PackedLinear, PackedLinear] | None:
    if isinstance(first, GroupedLinear) and isinstance(down, GroupedLinear):
        return first.packed, down.packed
    return None


@cache
def _is_right() -> bool:
    try:
        check_experts()
    except NoLibrary as error:
        logger.warning("experts: falling back to a loop, slower: %s", error)
        return False
    logger.info("experts: C++, one call per layer")
    return True
