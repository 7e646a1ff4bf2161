"""Windows, softcap and sinks on a CUDA device, over the kernels for Hopper and those for every device, against float64.

gpu_check.py lists and runs them beside the others. Knows torch and kernels/ only.
"""

import dataclasses
import itertools
from unittest import mock

import torch

from bench.kernel.attention_checks import MIXED, attend, attend_invariantly, part_of
from bench.kernel.cases import (
    Check,
    Error,
    HeadShape,
    attention_batch,
    attention_tolerance,
    exact_attention,
    measure_error,
    same_bits,
)
from kernels.attention import paged_attention as serving
from kernels.attention.score_rules import ScoreRules
from kernels.fp8_kv import KVScales

SCALES = KVScales(key=0.75, value=1.5)
# Narrower than a block, of a tile, unaligned, wider than most sequences; all of them with blocks released behind.
WINDOWS = (5, 128, 1000, 4096)
SHAPES = {"64 x 8 x 64": HeadShape(64, 8, 64), "32 x 8 x 128": HeadShape(32, 8, 128), "9 x 3 x 64": HeadShape(9, 3, 64)}
CASES = {
    "mixed": MIXED,
    "decode": [(977 * i, 1) for i in range(30)],
    "decode 1": [(20_000, 1)],
    "prefill": [(0, 700), (3000, 130), (64, 64), (5000, 2)],
}


def check_rules(
    heads: HeadShape, rules: ScoreRules, block_size: int, dtype: torch.dtype, fp8_scales: KVScales | None = None
) -> Check:
    """Every case by the kernels for Hopper, by those for every device, and by one kernel; twice the same bits."""

    def check(generator: torch.Generator) -> list[Error]:
        errors = []
        for lengths in CASES.values():
            batch = attention_batch(heads, block_size, lengths, dtype, generator, fp8_scales)
            sinks = None if rules.sinks is None else rules.sinks[: heads.num_heads].to(generator.device)
            batch = dataclasses.replace(batch, rules=dataclasses.replace(rules, sinks=sinks))
            for table, (cached, _) in zip(batch.block_tables, lengths, strict=True):
                # Block 0 holds NaN.
                table[: max(cached - rules.window + 1, 0) // block_size if rules.window else 0] = 0
            exact, output = exact_attention(batch), attend(batch)
            with mock.patch.object(serving, "supports_tma", lambda *_: False):
                elsewhere = attend(batch)
            outputs = (output, elsewhere, attend_invariantly(batch))
            errors += [measure_error(found, exact, attention_tolerance(dtype)) for found in outputs]
            errors.append(same_bits(attend(batch), output))
        return errors

    return check


def check_chunks_with_rules(heads: HeadShape, rules: ScoreRules, dtype: torch.dtype) -> Check:
    """A prompt in chunks has the bits of the prompt in one piece, and by one kernel a token those of its prompt."""

    def check(generator: torch.Generator) -> list[Error]:
        sinks = torch.linspace(-9, 9, heads.num_heads, device=generator.device)
        whole = attention_batch(heads, 16, [(0, 1200)], dtype, generator)
        whole = dataclasses.replace(whole, rules=dataclasses.replace(rules, sinks=sinks))
        pieces = [part_of(whole, 0, *ends, 0) for ends in itertools.pairwise((0, 33, 35, 300, 698, 1200))]
        errors = [same_bits(torch.cat([attend(piece) for piece in pieces]), attend(whole))]
        together = attend_invariantly(whole)
        for token in (0, 1, 511, 512, 700, 1199):
            alone = attend_invariantly(part_of(whole, 0, token, token + 1, 0))
            errors.append(same_bits(alone, together[token][None]))
        return errors

    return check


def score_rules_checks() -> dict[str, Check]:
    checks: dict[str, Check] = {}
    sinks = torch.linspace(-9, 9, 64)
    for name, heads in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float16):
            told = f"{name} {str(dtype).removeprefix('torch.')}"
            for window in WINDOWS:
                checks[f"rules window {window}, {told}"] = check_rules(heads, ScoreRules(window), 16, dtype)
            every = ScoreRules(200, 30.0, sinks)
            checks[f"rules softcap, {told}"] = check_rules(heads, ScoreRules(0, 30.0), 16, dtype)
            checks[f"rules sinks, {told}"] = check_rules(heads, ScoreRules(sinks=sinks), 16, dtype)
            for block_size in (8, 64, 128):
                checks[f"rules all, {told} block {block_size}"] = check_rules(heads, every, block_size, dtype)
            checks[f"rules all, fp8 kv {told}"] = check_rules(heads, every, 16, dtype, SCALES)
            checks[f"rules chunks, {told}"] = check_chunks_with_rules(heads, every, dtype)
    return checks
