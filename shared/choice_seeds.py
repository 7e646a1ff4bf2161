"""Derive the seed of each choice of a request from the request's seed. Pure.

Choice 0 has the request's own seed, so it does not change with n. A seed does not depend on n, or on the position of
the prompt in a list.
"""

import hashlib

SEED_BITS = 63


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice, from 0 to 2**63 - 1, for a `seed` in that range."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
