"""Check windows, softcap and sinks on a CUDA device against float64, in all kernels. Run by gpu_check.py."""

import dataclasses
import itertools
from unittest import mock

import torch

from bench.kernel.attention_checks import MIXED, attend, attend_invariantly, check_drafts, part_of
from bench.kernel.cases import (
    Check,
    Error,
    HeadShape,
    attention_batch,
    attention_tolerance,
    exact_attention,
    measure_error,
    same_bits,
    with_rules,
)
from kernels.attention import paged_attention as serving
from kernels.attention.score_rules import ScoreRules
from kernels.fp8_kv import KVScales

SCALES = KVScales(key=0.75, value=1.5)
# Query heads, KV heads, head size: gpt-oss, Llama-3.1-8B, SmolLM2 and Gemma 3.
G8, G4, G3, WIDE = HeadShape(64, 8, 64), HeadShape(32, 8, 128), HeadShape(9, 3, 64), HeadShape(8, 4, 256)
CASES = {
    "mixed": MIXED,
    "decode": [(977 * i, 1) for i in range(12)],
    "decode 1": [(20_000, 1)],
    "prefill": [(0, 700), (3000, 130), (64, 64), (5000, 2)],
}


def check_rules(
    heads: HeadShape, rules: ScoreRules, block_size: int, dtype: torch.dtype, fp8_scales: KVScales | None = None
) -> Check:
    """Check each case in the Hopper kernels, the others, and the batch-invariant one, for equal bits twice."""

    def check(generator: torch.Generator) -> list[Error]:
        errors = []
        for lengths in CASES.values():
            batch = attention_batch(heads, block_size, lengths, dtype, generator, fp8_scales)
            batch = with_rules(batch, rules)
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
    """Check that chunks have the bits of the whole prompt, in the Hopper kernels and the others.

    In the batch-invariant kernel a decoded token must have the bits of its prompt.
    """

    def check(generator: torch.Generator) -> list[Error]:
        sinks = torch.linspace(-9, 9, heads.num_heads, device=generator.device)
        whole = attention_batch(heads, 16, [(0, 1200)], dtype, generator)
        whole = dataclasses.replace(whole, rules=dataclasses.replace(rules, sinks=sinks))
        pieces = [part_of(whole, 0, *ends, 0) for ends in itertools.pairwise((0, 33, 35, 300, 698, 1200))]
        errors = [same_bits(torch.cat([attend(piece) for piece in pieces]), attend(whole))]
        with mock.patch.object(serving, "supports_tma", lambda *_: False):
            errors.append(same_bits(torch.cat([attend(piece) for piece in pieces]), attend(whole)))
        together = attend_invariantly(whole)
        for token in (0, 1, 511, 512, 700, 1199):
            alone = attend_invariantly(part_of(whole, 0, token, token + 1, 0))
            errors.append(same_bits(alone, together[token][None]))
        return errors

    return check


def score_rules_checks() -> dict[str, Check]:
    """Return the checks; each window and softcap is compiled separately, so there are few values."""
    sinks, bf16 = torch.linspace(-9, 9, 64), torch.bfloat16
    every = ScoreRules(200, 30.0, sinks)
    checks = {
        "rules none, wide heads": check_rules(WIDE, ScoreRules(), 16, bf16),
        "rules none, wide heads fp8 kv": check_rules(WIDE, ScoreRules(), 16, bf16, SCALES),
        # Narrower than a block; one tile wide, with sinks; wider than a split.
        "rules window 5, group 4 block 64": check_rules(G4, ScoreRules(5), 64, bf16),
        "rules window 128 and sinks, group 8": check_rules(G8, ScoreRules(128, sinks=sinks), 16, bf16),
        "rules window 4096, group 4": check_rules(G4, ScoreRules(4096), 16, bf16),
        "rules softcap, group 4": check_rules(G4, ScoreRules(softcap=50.0), 16, bf16),
        "rules sinks, group 3": check_rules(G3, ScoreRules(sinks=sinks), 16, bf16),
        "rules all, group 4 float16": check_rules(G4, every, 16, torch.float16),
        "rules all, group 4 fp8 kv": check_rules(G4, every, 16, bf16, SCALES),
        "rules all, wide heads fp8 kv": check_rules(WIDE, every, 16, bf16, SCALES),
    }
    for name, heads in {"group 8": G8, "group 4": G4, "group 3": G3, "wide heads": WIDE}.items():
        checks[f"rules all, {name}"] = check_rules(heads, every, 16, bf16)
        checks[f"rules chunks, {name}"] = check_chunks_with_rules(heads, every, bf16)
        checks[f"rules all, drafts, {name}"] = check_drafts(heads, bf16, every)
        checks[f"rules none, drafts, {name} fp8 kv"] = check_drafts(heads, bf16, fp8_scales=SCALES)
        checks[f"rules none, drafts, {name} float32"] = check_drafts(heads, torch.float32)
    for block_size in (8, 128):
        checks[f"rules all, group 4 block {block_size}"] = check_rules(G4, every, block_size, bf16)
    return checks
