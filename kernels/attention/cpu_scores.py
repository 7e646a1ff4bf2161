"""Attention of one group of sequences on a CPU, over gathered keys and values.

The mask decides which keys a query sees. ScoreRules add a softcap and sinks; the fused operator supports neither, so
with them the scores are written to memory, a few query tokens at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.score_rules import ScoreRules

# KV heads of all sequences times keys. Below this, scaled_dot_product_attention is faster than bmm, softmax, bmm.
_MAX_FUSED_WORK = 1536

# Query tokens whose scores are written at once: 16 MB for 8 heads and 2,048 keys in float32.
_QUERY_TOKENS_AT_ONCE = 256


def attend_decode(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, rules: ScoreRules
) -> Tensor:
    """Attend for sequences with one query token each.

    Args:
        query: [S, Hkv, G, D].
        keys: [S, Hkv, ctx, D].
        values: [S, Hkv, ctx, D].
        mask: [S, 1, 1, ctx], added to the scores, or None.
        scale: Factor of the scores.
        rules: Softcap and sinks; the window is already in the mask.

    Returns:
        [S, Hkv, G, D].
    """
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
    """Attend for one sequence with several query tokens.

    Args:
        query: [T, Hkv, G, D].
        keys: [Hkv, ctx, D].
        values: [Hkv, ctx, D].
        mask: [T, ctx], added to the scores; None: plain causal.
        scale: Factor of the scores.
        rules: Softcap and sinks; the window is already in the mask.

    Returns:
        [T, Hkv, G, D].
    """
    by_group = query.permute(2, 1, 0, 3)  # [G, Hkv, T, D]
    if _changes_scores(rules):
        return _prefill_by_scores(by_group, keys, values, mask, scale, rules).permute(2, 1, 0, 3)
    keys, values = keys.expand(len(by_group), -1, -1, -1), values.expand(len(by_group), -1, -1, -1)
    output = F.scaled_dot_product_attention(by_group, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return output.permute(2, 1, 0, 3)


def _prefill_by_scores(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, rules: ScoreRules
) -> Tensor:
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
    """Reshape sinks from [Hq] to [Hkv, G, 1]."""
    return None if sinks is None else sinks.view(num_kv_heads, -1, 1)


def _weights(scores: Tensor, mask: Tensor | None, rules: ScoreRules, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [..., ctx] in their dtype. A sink is one more score without a value."""
    exact = scores.float()
    if rules.softcap:
        exact = exact.div_(rules.softcap).tanh_().mul_(rules.softcap)
    if mask is not None:
        exact = exact + mask
    if sinks is None:
        return exact.softmax(-1).to(scores.dtype)
    column = sinks.float().expand(*exact.shape[:-1], 1)
    return torch.cat((exact, column), dim=-1).softmax(-1)[..., :-1].to(scores.dtype)
