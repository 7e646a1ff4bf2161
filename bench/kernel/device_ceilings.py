"""Measure the device's ceilings, the denominators of the kernel table.

copy: bytes read and written by a device-to-device copy. read: bytes read by a kernel that only sums. matmul: operations
of an 8192 x 8192 x 8192 product in bf16.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

COPY_BYTES = 4 * 2**30
MATMUL_SIZE = 8192
# (int32 elements per program, elements per load, warps); the fastest one depends on the memory controller.
READ_SHAPES = ((1 << 16, 4096, 8), (1 << 15, 8192, 8), (1 << 14, 4096, 4), (1 << 18, 8192, 16), (1 << 14, 2048, 4))
REPEATS = 20


@dataclass(frozen=True)
class Ceilings:
    copy_bytes_per_second: float
    read_bytes_per_second: float
    matmul_flops_per_second: float


def measure_ceilings() -> Ceilings:
    copy_seconds, read_seconds = _memory_seconds()
    return Ceilings(
        copy_bytes_per_second=2 * COPY_BYTES / copy_seconds,
        read_bytes_per_second=COPY_BYTES / read_seconds,
        matmul_flops_per_second=2 * MATMUL_SIZE**3 / _matmul_seconds(),
    )


def _memory_seconds() -> tuple[float, float]:
    source = torch.randint(-128, 127, (COPY_BYTES,), device="cuda", dtype=torch.int8)
    target = torch.empty_like(source)
    copy_seconds = time_once(lambda: target.copy_(source))
    return copy_seconds, min(_read_seconds(source.view(torch.int32), *shape) for shape in READ_SHAPES)


def _matmul_seconds() -> float:
    factors = [torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    product = torch.empty_like(factors[0])
    return time_once(lambda: torch.mm(*factors, out=product))


def time_once(call: Callable[[], object]) -> float:
    """Return the median seconds of one call, for calls much longer than their launch."""
    for _ in range(3):
        call()
    seconds = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


@triton.jit
def _sum_kernel(source, target, num_per_program, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_per_program, BLOCK):
        total ^= tl.load(source + program * num_per_program + start + tl.arange(0, BLOCK))
    tl.store(target + program, tl.sum(total, 0))


def _read_seconds(source: torch.Tensor, num_per_program: int, block: int, num_warps: int) -> float:
    target = torch.empty(source.numel() // num_per_program, device="cuda", dtype=torch.int32)
    grid = (target.numel(),)
    return time_once(lambda: _sum_kernel[grid](source, target, num_per_program, BLOCK=block, num_warps=num_warps))
