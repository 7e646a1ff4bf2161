"""A mixture of experts in C++ (csrc/experts.h): for the few tokens of a decode step, one call that can be recorded.

The bits of a token are those of a loop over its experts with PackedLinear.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from kernels.cpu.build import NoLibrary
from kernels.cpu.library import CpuLibrary, address, cpu_library, num_threads
from kernels.cpu.linear import (
    GROUP,
    NO_LIMITS,
    Gate,
    GateLimits,
    GroupedWeight,
    GroupFormat,
    LinearWeight,
    PackedLinear,
)
from kernels.cpu.step import DTYPES, SUFFIXES
from kernels.moe.routing import Router

MAX_EXPERTS, MAX_CHOSEN = 1024, 64  # of csrc/experts.h
_NO_MEMORY = 1


class _Router(ctypes.Structure):
    _fields_ = (
        ("correction", ctypes.c_void_p),
        ("experts", ctypes.c_int64),
        ("chosen", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("is_sigmoid", ctypes.c_int32),
        ("renormalizes", ctypes.c_int32),
        ("has_shared", ctypes.c_int32),
        ("has_gate", ctypes.c_int32),
    )


class _Experts(ctypes.Structure):
    _fields_ = (
        ("first", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("count", ctypes.c_int64),
    )


class PackedExperts:
    """Experts of one layer: [T, H] -> [T, H]."""

    def __init__(
        self,
        router: Router,
        experts: Sequence[tuple[PackedLinear, PackedLinear]],
        gate: Gate,
        start: int = 0,
        *,
        correction: Tensor | None = None,
        limits: GateLimits = NO_LIMITS,
        library: CpuLibrary | None = None,
    ) -> None:
        """Hold the experts.

        Args:
            router: How they are chosen: at most MAX_CHOSEN of at most MAX_EXPERTS, which are in one group.
            experts: The gated first and the second layer of each expert of this rank, in the same shapes and formats;
                of a shared one last.
            gate: Activation of the first layers.
            start: The first expert of this rank.
            correction: [E] float32, added to the scores for the choice only.
            limits: Of LIMITED_SILU.
            library: Its fastest instruction set is used; default: that of this processor.

        Raises:
            NoLibrary: If there is no library.
        """
        library = library or cpu_library()
        suffix = SUFFIXES[library.instruction_set]
        self._compute = getattr(library.functions, f"pagestream_experts_{suffix}")
        self._compute.argtypes = [
            *(ctypes.c_void_p,) * 4, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, *(ctypes.c_void_p,) * 4,
            ctypes.c_int,
        ]  # fmt: skip
        self._compute.restype = ctypes.c_int
        self._choose = getattr(library.functions, f"pagestream_choose_{suffix}")
        self._choose.argtypes = [*(ctypes.c_void_p,) * 2, ctypes.c_int64, *(ctypes.c_void_p,) * 2, ctypes.c_int]
        self._choose.restype = None
        assert router.num_experts + router.num_shared <= MAX_EXPERTS and router.top_k <= MAX_CHOSEN
        assert router.num_groups == 1
        self._shape = router.num_logits, router.top_k + router.num_shared
        self._linears, self._correction = list(experts), correction  # must stay alive: structures hold their addresses
        self._router = _Router(
            address(correction), router.num_experts, router.top_k, router.scale, router.scoring == "sigmoid",
            router.divides_by_chosen, router.num_shared, router.shared == "gated",
        )  # fmt: skip
        firsts = [first.structure(gate, limits) for first, _ in experts]
        downs = [down.structure() for _, down in experts]
        self._structures = (LinearWeight * len(firsts))(*firsts), (LinearWeight * len(downs))(*downs)
        self._experts = _Experts(*map(ctypes.addressof, self._structures), start, len(experts))
        self.inner = experts[0][1].inputs

    def __call__(self, x: Tensor, logits: Tensor, threads: int | None = None) -> Tensor:
        """Return the weighted sum of each token's experts of this rank.

        Args:
            x: [T, H], float32 or bfloat16.
            logits: [T, E] float32, of the router, and as a last one the gate of a shared expert.
            threads: Default: as many as torch's operators use.

        Returns:
            [T, H] in the dtype of x.

        Raises:
            MemoryError: If the kernel cannot allocate its scratch memory.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        (num_tokens, hidden), (num_logits, num_slots) = x.shape, self._shape
        num_pairs = num_tokens * num_slots
        assert logits.is_contiguous() and logits.shape == (num_tokens, num_logits)
        memory = torch.empty(4 * num_pairs + 2 * len(self._linears) + 2, dtype=torch.int32)
        inner, outputs = (
            torch.empty(num_pairs, self.inner, dtype=x.dtype),
            torch.empty(num_pairs, hidden, dtype=x.dtype),
        )
        out = torch.empty(num_tokens, hidden, dtype=x.dtype)
        status = self._compute(
            ctypes.addressof(self._experts), ctypes.addressof(self._router), logits.data_ptr(),
            x.data_ptr(), x.stride(0), DTYPES[x.dtype], num_tokens, memory.data_ptr(), inner.data_ptr(),
            outputs.data_ptr(), out.data_ptr(), threads or num_threads(),
        )  # fmt: skip
        if status == _NO_MEMORY:
            raise MemoryError(f"out of memory for the experts of {num_tokens} tokens")
        return out

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts [T, k] int64 of each token in ascending order, and their weights [T, k] float32."""
        num_tokens, shape = len(logits), (len(logits), self._shape[1])
        ids, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
        self._choose(
            ctypes.addressof(self._router),
            logits.data_ptr(),
            num_tokens,
            ids.data_ptr(),
            weights.data_ptr(),
            num_threads(),
        )
        return ids.long(), weights


@cache
def check_experts() -> None:
    """Compare a small layer with loops over its experts, once per process.

    Raises:
        NoLibrary: If there is no library, or the bits differ.
    """
    generator = torch.Generator().manual_seed(0)
    inputs, inner, num_experts, num_tokens = 70, 40, 6, 9
    x, logits = (
        torch.randn(num_tokens, inputs, generator=generator),
        torch.randn(num_tokens, num_experts, generator=generator),
    )

    def packed(outputs: int, inputs: int, *, is_gated: bool) -> PackedLinear:
        shape = (outputs, -(-inputs // GROUP), GROUP // 2)
        quants = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        scales, minima = (torch.rand(shape[:2], generator=generator).half() for _ in range(2))
        weight = GroupedWeight(GroupFormat.INT4_MINIMUM, quants, scales, -minima)
        return PackedLinear(weight, inputs, is_gated=is_gated)

    linears = [
        (packed(2 * inner, inputs, is_gated=True), packed(inputs, inner, is_gated=False)) for _ in range(num_experts)
    ]
    experts = PackedExperts(Router(num_experts=num_experts, top_k=3), linears[1:], Gate.SILU, start=1)
    ids, weights = experts.choose(logits)
    wanted = torch.zeros_like(x)
    for expert, (first, down) in enumerate(linears[1:], start=1):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        wanted[tokens] += down(first(x[tokens])) * weights[tokens, slots, None]
    if not all(
        torch.equal(experts(x[start:end], logits[start:end], threads=1), wanted[start:end])
        for start, end in pairwise((0, 1, num_tokens))
    ):
        raise NoLibrary(
            f"self-test failed: experts of {cpu_library().instruction_set.name} differ from loops over them"
        )
