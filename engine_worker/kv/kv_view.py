"""A snapshot of the KV cache as JSON values: every block's state, every sequence's blocks, and why others wait.

/debug/kv and the web page show it. It is built on request, between two steps, at about 0.1 us per block.
"""

from collections.abc import Iterable
from typing import Any

from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.kv.sequence import Sequence, SequenceStatus


def kv_view(kv_cache: KVAllocator, sequences: Iterable[Sequence], waits_for: str) -> dict[str, Any]:
    """Return the snapshot.

    Its `states` have one letter per block, by id: p(adding) f(ree) c(ached) a(ctive) s(hared). The block tables give
    the owners, one table per group of layers. `windows` has the window of each group in tokens, 0 for none.
    `recurrent_states` has the pools of states on the device and on the host, if there are any.

    Args:
        kv_cache: The cache.
        sequences: All sequences of the engine, running ones first.
        waits_for: What the first waiting sequence lacks.
    """
    device, host = kv_cache.device_pool, kv_cache.host_pool
    windows = [span.window for span in kv_cache.spans.groups]
    return {
        "block_size_tokens": kv_cache.block_size,
        "device": None if device is None else _pool_view(device),
        "host": None if host is None else _pool_view(host),
        "recurrent_states": {place: _pool_view(pool) for place, pool in kv_cache.state_pools.items()},
        "windows": windows,
        "waits_for": waits_for,
        "sequences": [_sequence_view(sequence, windows, kv_cache.block_size) for sequence in sequences],
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


def _sequence_view(sequence: Sequence, windows: list[int], block_size: int) -> dict[str, Any]:
    tables = sequence.kv.tables
    num_blocks = sum(len(table.blocks) + len(table.host_blocks) for table in tables)
    num_computed = len(tables) * sequence.kv.num_computed_tokens
    is_waiting = sequence.status is SequenceStatus.WAITING
    return {
        "request_id": sequence.request_id,
        "choice": sequence.sequence_index,
        "status": str(sequence.status),
        "num_tokens": sequence.num_tokens,
        "num_computed_tokens": sequence.kv.num_computed_tokens,
        "num_cached_tokens": sequence.num_cached_tokens,
        "num_empty_slots": 0 if is_waiting else num_blocks * block_size - num_computed,
        "num_preemptions": sequence.num_preemptions,
        "block_table": sequence.kv.blocks,
        "host_block_table": sequence.kv.host_blocks,
        "state_block": sequence.kv.state_block or None,
        "host_state_block": sequence.kv.host_state_block or None,
        "tables": [
            {
                "group": group,
                "window": windows[group],
                "num_released_blocks": table.num_released,
                "blocks": table.held,
                "host_blocks": table.host_held,
            }
            for group, table in enumerate(tables)
        ],
    }
