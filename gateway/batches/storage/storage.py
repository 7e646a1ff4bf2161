"""A directory of files and batches with its catalog. Blocking; thread-safe.

Gateways and drivers open it at the same time, each with its own Storage.
"""

from pathlib import Path

from gateway.batches.storage.batch_store import BatchStore
from gateway.batches.storage.catalog import Catalog
from gateway.batches.storage.disk import make_private
from gateway.batches.storage.file_store import FileStore
from gateway.batches.storage.quota import Quota
from shared.open_batches import CATALOG

MAX_SWEPT = 1000  # files and batches deleted per sweep


class Storage:
    """A directory of files and batches with its catalog, and the upkeep of both. Blocking."""

    def __init__(self, directory: Path, quota: Quota, retention_seconds: int) -> None:
        """Open the directory; raise OSError."""
        make_private(directory)
        self.retention_seconds = retention_seconds
        self._catalog = Catalog(directory / CATALOG, quota)
        self.files = FileStore(directory, self._catalog, retention_seconds)
        self.batches = BatchStore(directory, self._catalog, retention_seconds)
        self._reconcile()

    def used_bytes(self) -> int:
        return self._catalog.used_bytes()

    def num_open_batches(self) -> int:
        """Return the number of batches of all owners that have not ended."""
        return self._catalog.num_open_batches()

    def tidy(self) -> None:
        """Reconcile the catalog with the directory, and delete what has expired or was abandoned; raise OSError."""
        self._reconcile()
        self.files.sweep(MAX_SWEPT)
        self.batches.sweep(MAX_SWEPT)

    def close(self) -> None:
        self._catalog.close()

    def _reconcile(self) -> None:
        self.files.reconcile()
        self.batches.reconcile()
