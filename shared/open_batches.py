"""Whether a directory of files and batches has a batch that has not ended, as its catalog shows. Blocking.

gateway/batches/storage/catalog.py writes the catalog; the supervisor starts the batch driver by it.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

CATALOG = "catalog.sqlite"  # file name in the directory
COUNT_OPEN = "SELECT COUNT(*) FROM entries WHERE is_open"


def has_open_batch(directory: Path) -> bool:
    """Return whether a batch has not ended.

    False too while the catalog does not exist or cannot be read: gateways create it, and report its faults.
    """
    path = directory / CATALOG
    if not path.exists():
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return bool(connection.execute(COUNT_OPEN).fetchone()[0])
    except sqlite3.Error:
        return False
