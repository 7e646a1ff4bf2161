"""Attention of one sequence over a paged KV cache in plain torch: the specification of the kernels.

All scores are computed at once, in float32 or in the queries' dtype if that is wider. With a window, neither keys
before the first visible one nor their block table entries are read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.score_rules import ScoreRules
from kernels.fp8_kv import KVScales


@dataclass(frozen=True)
class PagedKV:
    """One layer's cache [N, Hkv, BS, D] and its scales."""

    key_cache: Tensor
    value_cache: Tensor
    scales: KVScales


def attend_sequence(
    query: Tensor, kv: PagedKV, block_table: Tensor, seq_len: int, scale: float, rules: ScoreRules
) -> Tensor:
    """Attend for the last tokens of a sequence.

    Args:
        query: [Q, Hq, D], the last Q tokens.
        kv: The layer's cache.
        block_table: [B], block ids of the sequence.
        seq_len: Tokens of the sequence, including the new ones.
        scale: Factor of the scores.
        rules: Window, softcap and sinks.

    Returns:
        [Q, Hq, D], dtype of query.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    first_key = max(seq_len - len(query) - rules.window + 1, 0) if rules.window else 0
    keys, values = (
        _gather(cache, block_table, first_key, seq_len).to(dtype) for cache in (kv.key_cache, kv.value_cache)
    )
    return _attend(query, keys * kv.scales.key, values * kv.scales.value, scale, rules)


def _gather(cache: Tensor, block_table: Tensor, first_key: int, seq_len: int) -> Tensor:
    """Return a sequence's keys or values [seq_len - first_key, Hkv, D] as a contiguous cache would hold them."""
    block_size = cache.shape[2]
    first_block = first_key // block_size
    blocks = block_table[first_block : -(-seq_len // block_size)].long()
    gathered = cache[blocks].transpose(1, 2).flatten(0, 1)
    return gathered[first_key - first_block * block_size : seq_len - first_block * block_size]


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, rules: ScoreRules) -> Tensor:
    """Attend with query [Q, Hq, D] to keys and values [K, Hkv, D]; both end at the same position."""
    query_len, num_keys, group = query.shape[0], keys.shape[0], query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.to(keys.dtype), keys) * scale
    if rules.softcap:
        scores = rules.softcap * (scores / rules.softcap).tanh()
    row_positions = torch.arange(num_keys - query_len, num_keys, device=query.device)[:, None]
    key_positions = torch.arange(num_keys, device=query.device)
    visible = key_positions <= row_positions
    if rules.window:
        visible &= key_positions > row_positions - rules.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks.to(scores)[:, None, None].expand(-1, query_len, 1)
        scores = torch.cat((scores, sinks), dim=2)
    # A row before position 0 sees no key: its softmax is 0 / 0, its output must be 0.
    weights = scores.softmax(dim=-1)[..., :num_keys].masked_fill(~visible, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
