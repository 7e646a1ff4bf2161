"""Scores, softmax and weighted sum of one group of sequences on a CPU, whose keys and values lie gathered.

    attend_decode(...)    sequences with one query token each
    attend_prefill(...)   one sequence with several

Which keys a query sees the mask says; what else changes its scores (a cap, sinks) ScoreRules say. A fused operator
knows neither cap nor sink, so with them scores are written down, some query tokens at a time. Knows no block and no
layer. It serves cpu.py, once a layer in every step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.score_rules import ScoreRules

# KV heads of all sequences times keys: below this scaled_dot_product_attention beats bmm, softmax, bmm.
_MAX_FUSED_WORK = 1536

# Query tokens whose scores are written down at once: 16 MB for 8 heads and 2,048 keys in float32.
_QUERY_TOKENS_AT_ONCE = 256


def attend_decode(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, rules: ScoreRules
) -> Tensor:
    """query [S, Hkv, G, D], keys and values [S, Hkv, ctx, D], mask [S, 1, 1, ctx] -> [S, Hkv, G, D]."""
    num_heads, context = keys.shape[0] * keys.shape[1], keys.shape[2]
    changes_scores = _changes_scores(rules)
    if num_heads * context <= _MAX_FUSED_WORK and not changes_scores:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scaled = (query * scale).view(num_heads, -1, query.shape[-1])
    scores = torch.bmm(scaled, keys.flatten(0, 1).transpose(1, 2))
    if changes_scores:
        weights = _weights(scores.view(*query.shape[:3], context), mask, rules, _by_head(rules.sinks, query.shape[1]))
        return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(query.shape)
    if mask is not None:
        scores.view(*query.shape[:3], context).add_(mask)
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(query.shape)


def attend_prefill(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, rules: ScoreRules
) -> Tensor:
    """query [T, Hkv, G, D], keys and values [Hkv, ctx, D], mask [T, ctx] or none if merely causal -> [T, Hkv, G, D]."""
    by_group = query.permute(2, 1, 0, 3)  # [G, Hkv, T, D]
    if _changes_scores(rules):
        return _prefill_by_scores(by_group, keys, values, mask, scale, rules).permute(2, 1, 0, 3)
    keys, values = keys.expand(len(by_group), -1, -1, -1), values.expand(len(by_group), -1, -1, -1)
    output = F.scaled_dot_product_attention(by_group, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return output.permute(2, 1, 0, 3)


def _prefill_by_scores(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, rules: ScoreRules
) -> Tensor:
    """query [G, Hkv, T, D] -> the same shape."""
    num_tokens, context = query.shape[2], keys.shape[1]
    sinks = _by_head(rules.sinks, query.shape[1])
    sinks = None if sinks is None else sinks.transpose(0, 1)[:, :, None]  # [G, Hkv, 1, 1]
    outputs = []
    for start in range(0, num_tokens, _QUERY_TOKENS_AT_ONCE):
        part = query[:, :, start : start + _QUERY_TOKENS_AT_ONCE]
        rows = part.shape[2]
        if mask is None:
            hidden = torch.full((rows, context), -torch.inf, dtype=query.dtype).triu(start + 1)
        else:
            hidden = mask[start : start + rows]
        outputs.append(_weights((part * scale) @ keys.transpose(1, 2), hidden, rules, sinks) @ values)
    return torch.cat(outputs, dim=2)


def _changes_scores(rules: ScoreRules) -> bool:
    return rules.softcap > 0 or rules.sinks is not None


def _by_head(sinks: Tensor | None, num_kv_heads: int) -> Tensor | None:
    """[Hq] -> [Hkv, G, 1]"""
    return None if sinks is None else sinks.view(num_kv_heads, -1, 1)


def _weights(scores: Tensor, mask: Tensor | None, rules: ScoreRules, sinks: Tensor | None) -> Tensor:
    """scores [..., ctx] -> their softmax, in their type; a sink is one more score whose value is nothing."""
    exact = scores.float()
    if rules.softcap:
        exact = exact.div_(rules.softcap).tanh_().mul_(rules.softcap)
    if mask is not None:
        exact = exact + mask
    if sinks is None:
        return exact.softmax(-1).to(scores.dtype)
    column = sinks.float().expand(*exact.shape[:-1], 1)
    return torch.cat((exact, column), dim=-1).softmax(-1)[..., :-1].to(scores.dtype)
