"""The catalog of files and batches, with owners and sizes: one SQLite database for all gateways. Blocking; thread-safe.

The directory is the truth and the catalog its index, which reconcile() of the stores can rebuild. Space is reserved
here before it is used there, in one transaction with the sums, so gateways and uploads see each other. The rollback
journal is used instead of write-ahead logging because it works wherever file locks do.
"""

import errno
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gateway.batches.storage.quota import Quota
from shared.open_batches import COUNT_OPEN

BUSY_SECONDS = 60.0  # longest transaction of another process: the first index of many files


Kind = Literal["part", "file", "batch"]


_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, created_ns INTEGER NOT NULL, bytes INTEGER NOT NULL,
    purpose TEXT NOT NULL, record BLOB NOT NULL, expires_at INTEGER, is_open INTEGER NOT NULL,
    is_cancelling INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pages ON entries (owner, kind, created_ns, id);
CREATE INDEX IF NOT EXISTS expiry ON entries (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS open ON entries (owner, is_cancelling, created_ns) WHERE is_open;
CREATE TABLE IF NOT EXISTS usage (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entries BEGIN
    INSERT INTO usage VALUES (NEW.owner, NEW.bytes) ON CONFLICT DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF bytes ON entries BEGIN
    UPDATE usage SET bytes = bytes + NEW.bytes - OLD.bytes WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON entries BEGIN
    UPDATE usage SET bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
END;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    id: str
    kind: Kind
    owner: str
    created_ns: int  # defines the order of lists
    num_bytes: int  # used or reserved
    purpose: str = ""
    record: bytes = b""
    expires_at: int | None = None  # Unix seconds
    is_open: bool = False  # True for a batch that has not ended


@dataclass(frozen=True, slots=True)
class OpenBatch:
    id: str
    created_ns: int


class Catalog:
    def __init__(self, path: Path, quota: Quota) -> None:
        """Open or create the database; raise OSError."""
        self._lock = threading.Lock()
        self._quota = quota
        with _as_os_error():
            self._connection = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA recursive_triggers = ON")  # REPLACE then fires the delete trigger too
            self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    # -- space

    def begin(self, entry: Entry, *, max_of_kind: int | None = None) -> bool:
        """Add an entry if there is space; return False if its owner has `max_of_kind` entries already.

        Raises:
            StorageFull: If the quota is exhausted.
        """
        with self._transaction() as connection:
            if max_of_kind is not None:
                count = "SELECT COUNT(*) FROM entries WHERE owner = ? AND kind = ?"
                if connection.execute(count, (entry.owner, entry.kind)).fetchone()[0] >= max_of_kind:
                    return False
            self._check(connection, entry.owner, entry.num_bytes)
            _insert(connection, entry)
            return True

    def raise_to(self, entry_id: str, num_bytes: int) -> None:
        """Raise the reservation of an entry to at least `num_bytes`.

        Raises:
            StorageFull: If the quota is exhausted.
            FileNotFoundError: If the entry is gone.
        """
        with self._transaction() as connection:
            found = connection.execute("SELECT owner, bytes FROM entries WHERE id = ?", (entry_id,)).fetchone()
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "no such entry", entry_id)
            owner, before = found
            if num_bytes > before:
                self._check(connection, owner, num_bytes - before)
                connection.execute("UPDATE entries SET bytes = ? WHERE id = ?", (num_bytes, entry_id))

    def lower_to(self, entry_id: str, num_bytes: int) -> None:
        """Lower the reservation of an entry to at most `num_bytes`. Idempotent."""
        with self._transaction() as connection:
            connection.execute("UPDATE entries SET bytes = MIN(bytes, ?) WHERE id = ?", (num_bytes, entry_id))

    def replace(self, entries: Iterable[Entry], gone_ids: Iterable[str] = ()) -> None:
        """Add `entries` regardless of the quota, and remove `gone_ids`."""
        with self._transaction() as connection:
            connection.executemany("DELETE FROM entries WHERE id = ?", [(entry_id,) for entry_id in gone_ids])
            for entry in entries:
                _insert(connection, entry)

    def delete(self, *entry_ids: str) -> None:
        self.replace((), entry_ids)

    def used_bytes(self) -> int:
        return int(self._select("SELECT COALESCE(SUM(bytes), 0) FROM usage")[0][0])

    def _check(self, connection: sqlite3.Connection, owner: str, more: int) -> None:
        sums = "SELECT COALESCE(SUM(bytes), 0), COALESCE(SUM(bytes) FILTER (WHERE owner = ?), 0) FROM usage"
        used, used_by_owner = connection.execute(sums, (owner,)).fetchone()
        self._quota.check(owner, more, used, used_by_owner)

    # -- lists

    def page(
        self, owner: str, kind: Kind, *, limit: int, purpose: str | None = None, after: str | None = None,
        ascending: bool = False,
    ) -> list[bytes] | None:  # fmt: skip
        """Return a page of records, newest first unless `ascending`, or None if `after` is unknown."""
        beyond, order = (">", "ASC") if ascending else ("<", "DESC")
        conditions, values = ["owner = ?", "kind = ?"], list[object]([owner, kind])
        if purpose is not None:
            conditions.append("purpose = ?")
            values.append(purpose)
        if after is not None:
            found = self._select(
                f"SELECT created_ns FROM entries WHERE {' AND '.join(conditions)} AND id = ?", *values, after
            )
            if not found:
                return None
            conditions.append(f"(created_ns, id) {beyond} (?, ?)")
            values += [found[0][0], after]
        rows = self._select(
            f"SELECT record FROM entries WHERE {' AND '.join(conditions)} "
            f"ORDER BY created_ns {order}, id {order} LIMIT ?",
            *values, limit,
        )  # fmt: skip
        return [record for (record,) in rows]

    def open_batches(self, per_owner: int) -> list[OpenBatch]:
        """Return up to `per_owner` open batches of each owner: those being cancelled first, then the oldest."""
        rows = self._select(
            "SELECT id, created_ns FROM (SELECT *, ROW_NUMBER() OVER "
            "(PARTITION BY owner ORDER BY is_cancelling DESC, created_ns) AS place FROM entries WHERE is_open) "
            "WHERE place <= ?",
            per_owner,
        )
        return [OpenBatch(*row) for row in rows]

    def num_open_batches(self) -> int:
        return int(self._select(COUNT_OPEN)[0][0])

    def set_cancelling(self, batch_id: str) -> None:
        with self._transaction() as connection:
            connection.execute("UPDATE entries SET is_cancelling = 1 WHERE id = ?", (batch_id,))

    def ids(self, kind: Kind) -> set[str]:
        return {entry_id for (entry_id,) in self._select("SELECT id FROM entries WHERE kind = ?", kind)}

    def expired(self, kind: Kind, now: float, limit: int) -> list[str]:
        query = "SELECT id FROM entries WHERE expires_at <= ? AND kind = ? LIMIT ?"
        return [entry_id for (entry_id,) in self._select(query, now, kind, limit)]

    def _select(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, _as_os_error(), closing(self._connection.execute(query, values)) as cursor:
            return cursor.fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction; SQLite admits one process at a time."""
        with self._lock, _as_os_error():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def _insert(connection: sqlite3.Connection, entry: Entry) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
        (
            entry.id, entry.kind, entry.owner, entry.created_ns, entry.num_bytes, entry.purpose, entry.record,
            entry.expires_at, entry.is_open,
        ),
    )  # fmt: skip


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Convert errors of SQLite to OSError."""
    try:
        yield
    except sqlite3.Error as error:
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise OSError(errno.ENOSPC if is_full else errno.EIO, f"file catalog: {error}") from error
