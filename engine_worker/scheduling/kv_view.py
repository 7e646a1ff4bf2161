"""The KV cache as somebody who asks sees it: every block's state, every sequence's blocks, and why others wait.

Built when asked for, between two steps; costs about 0.1 us a block. Plain dicts and lists: they go out as JSON.

It stands beside the walk of a block: /debug/kv and the live page show it. It knows counts and ids, never tokens, and
changes nothing.
"""

from collections.abc import Iterable
from typing import Any

from engine_worker.scheduling.block_pool import BlockPool
from engine_worker.scheduling.kv_allocator import KVAllocator
from engine_worker.scheduling.sequence import Sequence, SequenceStatus


def kv_view(kv_cache: KVAllocator, sequences: Iterable[Sequence], waits_for: str) -> dict[str, Any]:
    """`sequences`: all of the engine, those that run first; `waits_for`: why the first that waits does.

    states: a letter a block, by id: p(adding) f(ree) c(ached) a(ctive) s(hared). Owners follow from the block tables.
    """
    device, host = kv_cache.device_pool, kv_cache.host_pool
    return {
        "block_size_tokens": kv_cache.block_size,
        "device": None if device is None else _pool_view(device),
        "host": None if host is None else _pool_view(host),
        "waits_for": waits_for,
        "sequences": [_sequence_view(sequence, kv_cache.block_size) for sequence in sequences],
        "totals": kv_cache.events.totals_as_dict(),
    }


def _pool_view(pool: BlockPool) -> dict[str, Any]:
    return {
        "num_blocks": pool.num_usable_blocks,
        "num_free_blocks": pool.num_free_blocks,
        "num_cached_blocks": pool.num_cached_blocks,
        "num_active_blocks": pool.num_active_blocks,
        "states": pool.states(),
        "ref_counts": {str(block_id): count for block_id, count in pool.shared_blocks()},
    }


def _sequence_view(sequence: Sequence, block_size: int) -> dict[str, Any]:
    num_blocks = len(sequence.kv.block_table) + len(sequence.kv.host_block_table)
    is_waiting = sequence.status is SequenceStatus.WAITING
    return {
        "request_id": sequence.request_id,
        "choice": sequence.sequence_index,
        "status": str(sequence.status),
        "num_tokens": sequence.num_tokens,
        "num_computed_tokens": sequence.kv.num_computed_tokens,
        "num_cached_tokens": sequence.num_cached_tokens,
        "num_empty_slots": 0 if is_waiting else num_blocks * block_size - sequence.kv.num_computed_tokens,
        "num_preemptions": sequence.num_preemptions,
        "block_table": sequence.kv.blocks,
        "host_block_table": sequence.kv.host_blocks,
    }
