"""Block hashes identify the whole prefix, the tenant, and the salt, and each token is hashed once."""

from hashlib import sha256

import pytest

from engine_worker.kv import prefix_cache
from engine_worker.kv.prefix_cache import cache_root, extend_digests
from engine_worker.kv.sequence import Sequence
from tests.builders import make_sequence


def hashed(token_ids: list[int], num_blocks: int, root: bytes = b"") -> list[bytes]:
    sequence = make_sequence(token_ids)
    sequence.kv.cache_root = root
    extend_digests(sequence, num_blocks, block_size=4)
    return sequence.kv.digests


def test_block_hash_covers_every_token_before_it() -> None:
    tokens = list(range(10, 26))
    base = hashed(tokens, 4)
    for position in range(16):
        changed = [*tokens[:position], 99, *tokens[position + 1 :]]
        equal = [left == right for left, right in zip(base, hashed(changed, 4), strict=True)]
        assert equal == [index < position // 4 for index in range(4)]


def test_block_hash_is_sha256_of_parent_and_token_ids() -> None:
    first = sha256(b"root" + bytes.fromhex("01000000 02000000 03000000 ffffff7f")).digest()
    second = sha256(first + bytes.fromhex("05000000 06000000 07000000 08000000")).digest()
    assert hashed([1, 2, 3, 2**31 - 1, 5, 6, 7, 8], 2, root=b"root") == [first, second]


def test_cache_root_separates_tenant_and_salt() -> None:
    roots = [cache_root(*pair) for pair in (("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("1:a", "b"))]
    assert len(set(roots)) == len(roots)
    assert cache_root("a", "b") == cache_root("a", "b")


def test_block_hashes_cover_prompt_and_output_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    def pack(token_ids: list[int]) -> bytes:
        packed.extend(token_ids)
        return original(token_ids)

    original = prefix_cache.pack_token_ids
    monkeypatch.setattr(prefix_cache, "pack_token_ids", pack)
    sequence: Sequence = make_sequence([1, 2, 3, 4, 5, 6])
    for num_blocks in (1, 1, 0):
        extend_digests(sequence, num_blocks, block_size=4)
    sequence.output_token_ids += [7, 8]
    extend_digests(sequence, 2, block_size=4)
    assert packed == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sequence.kv.digests == hashed([1, 2, 3, 4, 5, 6, 7, 8], 2)
