"""The supervisor sees in the catalog of files whether a batch has not ended."""

from pathlib import Path

from gateway.batches.storage.quota import Quota
from gateway.batches.storage.storage import Storage
from shared.open_batches import CATALOG, has_open_batch


def test_open_batch_is_found_until_it_ends(tmp_path: Path) -> None:
    kept = tmp_path / "a folder with spaces"
    assert not has_open_batch(kept)
    storage = Storage(kept, Quota(2**20), 3600)
    assert not has_open_batch(kept)
    (kept / "in").write_bytes(b"{}")
    folder = storage.batches.create("", "/v1/completions", "file-" + "0" * 32, kept / "in", "24h", None)
    assert has_open_batch(kept)
    storage.batches.end(folder)
    assert not has_open_batch(kept)
    storage.close()


def test_unreadable_catalog_has_no_open_batch(tmp_path: Path) -> None:
    (tmp_path / CATALOG).write_bytes(b"no database" * 1000)
    assert not has_open_batch(tmp_path)
