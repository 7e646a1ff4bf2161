"""Disk quota for files and batches, in total and per key, over several catalogs of one directory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.batches.storage.catalog import Catalog, Entry
from gateway.batches.storage.quota import Quota, StorageFull


def taken(quota: Quota, owner: str, used: dict[str, int]) -> int:
    """Take one byte at a time until refused; return the number of bytes."""
    before = used.get(owner, 0)
    while True:
        try:
            quota.check(owner, 1, sum(used.values()), used.get(owner, 0))
        except StorageFull:
            return used.get(owner, 0) - before
        used[owner] = used.get(owner, 0) + 1


def test_each_key_leaves_room_for_the_next() -> None:
    used: dict[str, int] = {}
    quota = Quota(120)
    assert [taken(quota, owner, used) for owner in "abc"] == [60, 30, 15]
    assert taken(quota, "a", used) == 0


def test_quota_without_keys_is_shared_and_a_limit_is_exact() -> None:
    assert taken(Quota(100), "", {}) == 100
    used: dict[str, int] = {}
    assert [taken(Quota(100, 70), owner, used) for owner in "ab"] == [70, 30]


def entry(name: str, owner: str, num_bytes: int) -> Entry:
    return Entry(id=name, kind="file", owner=owner, created_ns=0, num_bytes=num_bytes)


def test_several_gateways_never_exceed_the_quota(tmp_path: Path) -> None:
    catalogs = [Catalog(tmp_path / "catalog", Quota(1000)) for _ in range(3)]

    def take(number: int) -> bool:
        try:
            return catalogs[number % 3].begin(entry(str(number), "", 30))
        except StorageFull:
            return False

    with ThreadPoolExecutor(12) as threads:
        assert sum(threads.map(take, range(60))) == 33
    assert {catalog.used_bytes() for catalog in catalogs} == {990}
    catalogs[0].delete(*map(str, range(60)))
    assert catalogs[2].used_bytes() == 0
    for catalog in catalogs:
        catalog.close()


def test_sums_follow_every_change(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog", Quota(100))
    catalog.begin(entry("x", "a", 10))
    catalog.raise_to("x", 20)
    catalog.raise_to("x", 5)  # it may keep more than it may take now
    assert catalog.used_bytes() == 20
    with pytest.raises(StorageFull):
        catalog.raise_to("x", 51)
    catalog.replace([entry("x", "a", 7), entry("y", "b", 3)])
    assert catalog.used_bytes() == 10
    catalog.replace([entry("z", "a", 1)], ["x"])
    assert catalog.used_bytes() == 4
    with pytest.raises(FileNotFoundError):
        catalog.raise_to("x", 8)
    catalog.close()


def test_pages_are_read_from_the_index(tmp_path: Path) -> None:
    """A page of a long list costs only the page: SQLite's query plan has no scan and no sort."""
    catalog = Catalog(tmp_path / "catalog", Quota(2**40))
    catalog.replace(
        Entry(id=f"{number:05}", kind="file", owner="ab"[number % 2], created_ns=number // 3, num_bytes=1,
              record=str(number).encode())
        for number in range(10_000)
    )  # fmt: skip
    first = catalog.page("a", "file", limit=3)
    assert first == [b"9998", b"9996", b"9994"]
    assert catalog.page("a", "file", limit=2, after="09996") == [b"9994", b"9992"]
    assert catalog.page("b", "file", limit=2, after="00003", ascending=True) == [b"5", b"7"]
    assert catalog.page("a", "file", limit=2, after="00001") is None  # another owner's
    queries: list[str] = []
    catalog._connection.set_trace_callback(queries.append)
    catalog.page("a", "file", limit=3, after="09996")
    catalog._connection.set_trace_callback(None)
    for query in queries:
        plan = " ".join(row[3] for row in catalog._connection.execute(f"EXPLAIN QUERY PLAN {query}"))
        assert "SEARCH" in plan and "SCAN" not in plan and "TEMP B-TREE" not in plan, plan
    catalog.close()
