"""Check an e4m3 KV cache on a CUDA device: stored values bit by bit, attention against float64. Run by gpu_check.py."""

import torch

from bench.kernel.attention_checks import (
    check_attention,
    check_captured,
    check_chunks,
    check_for_every_device,
    check_invariance,
)
from bench.kernel.cases import HEAD_SHAPES, Check, Error, same_bits
from kernels.fp8_kv import E4M3, KVScales, to_e4m3
from kernels.kv_block_copy import copy_kv_blocks
from kernels.rotary_embedding import RotaryInput, rotate_and_store, store_kv_reference

SCALES = KVScales(key=0.75, value=1.5)


def check_stored(shape: str, num_tokens: int, dtype: torch.dtype, block_size: int) -> Check:
    """Check rotated keys and values, divided by their scales and rounded, some beyond 448; no other byte changes."""
    heads = HEAD_SHAPES[shape]

    def check(generator: torch.Generator) -> list[Error]:
        device, kv_heads = generator.device, heads.num_kv_heads
        rotated = heads.num_heads + kv_heads
        pool = torch.zeros(130, 2, 2, kv_heads, block_size, heads.head_dim, dtype=E4M3, device=device)
        qkv = torch.randn(num_tokens, rotated + kv_heads, heads.head_dim, device=device, generator=generator)
        qkv = (100 * qkv).to(dtype)
        positions = torch.randint(8192, (num_tokens,), device=device, generator=generator)
        angles = torch.rand(8192, heads.head_dim // 2, device=device, generator=generator) * 6.28
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        slots = torch.randperm(130 * block_size, device=device, generator=generator)[:num_tokens]
        slots[1::7] = -1
        expected = pool.clone().view(torch.uint8)
        rotate_and_store(RotaryInput(qkv, positions, table, pool[:, 1, 0], pool[:, 1, 1], slots, kv_scales=SCALES))
        keys, values = qkv[:, heads.num_heads : rotated], qkv[:, rotated:]
        stored = to_e4m3(keys, SCALES.key).view(torch.uint8), to_e4m3(values, SCALES.value).view(torch.uint8)
        store_kv_reference(*stored, expected[:, 1, 0], expected[:, 1, 1], slots)
        return [same_bits(pool.view(torch.uint8), expected)]

    return check


def check_copies(shape: str) -> Check:
    """Check that every code is copied unchanged, including NaN."""
    heads = HEAD_SHAPES[shape]

    def check(generator: torch.Generator) -> list[Error]:
        size = (64, 3, 2, heads.num_kv_heads, 16, heads.head_dim)
        codes = torch.randint(256, size, device=generator.device, generator=generator).to(torch.uint8)
        expected, pool = codes.clone(), codes.view(E4M3)
        copies = torch.randperm(64, device=generator.device, generator=generator)[:20].view(10, 2)
        copy_kv_blocks(pool, pool, copies)
        expected[copies[:, 1]] = expected[copies[:, 0]]
        return [same_bits(codes, expected)]

    return check


def fp8_kv_checks(lengths_by_case: dict[str, list[tuple[int, int]]]) -> dict[str, Check]:
    checks: dict[str, Check] = {}
    for shape in HEAD_SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            name = f"{shape} {str(dtype).removeprefix('torch.')}"
            for block_size in (8, 16, 32, 64) if dtype == torch.bfloat16 else (16,):
                checks[f"fp8 kv stored, {name} block {block_size}"] = check_stored(shape, 300, dtype, block_size)
                for case, lengths in lengths_by_case.items():
                    attention = check_attention(shape, block_size, lengths, dtype, SCALES)
                    checks[f"fp8 kv {case}, {name} block {block_size}"] = attention
            checks[f"fp8 kv mixed for every device, {name}"] = check_for_every_device(shape, dtype, SCALES)
            checks[f"fp8 kv invariance {name}"] = check_invariance(shape, dtype, SCALES)
            checks[f"fp8 kv chunks {name}"] = check_chunks(shape, dtype, SCALES)
            checks[f"fp8 kv captured {name}"] = check_captured(shape, dtype, SCALES)
        checks[f"fp8 kv copies {shape}"] = check_copies(shape)
    return checks
