"""The dynamic threshold that divides a resource between API keys.

Use it for what cannot be taken back once granted: queue places, open streams, bytes in memory. Running slots and KV
blocks are divided by preemption instead (`engine_worker/scheduling`).
"""

ALPHA = 4.0  # one busy key may hold 80 % of a resource, two keys 44 % each; the rest stays free for a new key


def may_take(held: float, want: float, free: float, weight: float = 1.0, alpha: float = ALPHA) -> bool:
    """Return whether a key may take `want` more units of a resource.

    The threshold shrinks as the resource fills, so no key can take the last free part, and it needs no list of keys.

    Args:
        held: Units that the key holds now.
        want: Units that the key asks for.
        free: Units that are free now.
        weight: Share of the key relative to others; 1 by default.
        alpha: Multiple of the free units that one key of weight 1 may hold.

    Source: Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, 1998.
    """
    return want <= free and held + want <= alpha * weight * free
