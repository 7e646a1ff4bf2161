"""The seed of each choice of a request, derived of the request's. Pure.

The first choice has the request's own seed, so that it is the same with n = 1. A seed does not depend on n, nor
on the place of the prompt in a list.

A token's way back begins with it: the sampler draws by (seed, index). It knows no request.
"""

import hashlib

SEED_BITS = 63


def choice_seed(seed: int, choice: int) -> int:
    """0 .. 2**63 - 1, for a `seed` in that range."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
