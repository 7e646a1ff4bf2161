"""A directory of files and batches, with its catalog and what keeps both in order. Blocking.

Beside the walks: service.py and the routes of files and batches have it. It knows no request.
"""

from pathlib import Path

from gateway.batches.batch_store import BatchStore
from gateway.batches.catalog import Catalog
from gateway.batches.disk import make_private
from gateway.batches.file_store import FileStore
from gateway.batches.quota import Quota

SWEPT = 1000  # files, and batches, at one time


class Storage:
    def __init__(self, directory: Path, quota: Quota, retention_seconds: int) -> None:
        """Raises OSError."""
        make_private(directory)
        self.retention_seconds = retention_seconds
        self._catalog = Catalog(directory / "catalog.sqlite", quota)
        self.files = FileStore(directory, self._catalog, retention_seconds)
        self.batches = BatchStore(directory, self._catalog, retention_seconds)
        self.files.prepare()
        self.batches.prepare()
        self._reconcile()

    def used_bytes(self) -> int:
        return self._catalog.used_bytes()

    def tidy(self) -> None:
        """Learn what came and went by other hands, and delete what has expired or was left behind. Raises OSError."""
        self._reconcile()
        self.files.sweep(SWEPT)
        self.batches.sweep(SWEPT)

    def close(self) -> None:
        self._catalog.close()

    def _reconcile(self) -> None:
        self.files.reconcile()
        self.batches.reconcile()
