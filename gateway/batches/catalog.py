"""The list of files and batches, whose they are and how many bytes each may take: SQLite, one for all gateways.

What is in the directory is the truth, and this its index: made anew from it (reconcile() of the stores) if it is lost.
Room is taken here before it is used there, in one transaction with the sums: gateways and uploads see each other. Its
journal is rolled back, not written ahead, which works wherever file locks do. Blocking; for any thread.

Beside the walks: the stores of files and batches ask it before they write. It knows no line and no answer.
"""

import errno
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gateway.errors import FilesFull

BUSY_SECONDS = 60.0  # another gateway's transaction: a first index of many files, at most


@dataclass(frozen=True, slots=True)
class Quota:
    """Without a limit of its own a key may have as many bytes as it leaves free: one alone has half, two have a third
    each. So there is room for a key that has none, however many others take all they can get."""

    max_bytes: int
    max_bytes_per_key: int | None = None

    def check(self, owner: str, more: int, used: int, used_by_owner: int) -> None:
        """May `owner` have so many more? Without keys all is of one owner, "", who may have everything.

        Raises FilesFull.
        """
        free = self.max_bytes - used - more
        if free < 0:
            raise FilesFull(
                f"There is no room for {more} bytes: {used} of the {self.max_bytes} for files and batches are taken. "
                "Delete files, or come again when others have expired."
            )
        most = self.max_bytes_per_key
        if most is None:
            most = free + used_by_owner + more if not owner else max(free, 0)
        if used_by_owner + more > most:
            raise FilesFull(
                f"There is no room for {more} bytes: files and batches of this key have {used_by_owner}, and may have "
                f"{most} now. Delete files or ended batches."
            )


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
    created_ns: int  # the order of lists
    num_bytes: int  # that it has or may take
    purpose: str = ""
    record: bytes = b""
    expires_at: int | None = None  # Unix seconds
    is_open: bool = False  # a batch that has not ended


@dataclass(frozen=True, slots=True)
class OpenBatch:
    id: str
    owner: str
    created_ns: int
    is_cancelling: bool


class Catalog:
    def __init__(self, path: Path, quota: Quota) -> None:
        """Raises OSError."""
        self._lock = threading.Lock()
        self._quota = quota
        with _as_os_error():
            self._connection = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA recursive_triggers = ON")  # so REPLACE is told as a removal too
            self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    # -- room

    def begin(self, entry: Entry, *, max_of_kind: int | None = None) -> bool:
        """A new one, for which there must be room. False: its owner has as many of the kind as it may.

        Raises FilesFull.
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
        """It may take so many, or as many as it may already. Raises FilesFull, and FileNotFoundError if it is gone."""
        with self._transaction() as connection:
            found = connection.execute("SELECT owner, bytes FROM entries WHERE id = ?", (entry_id,)).fetchone()
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "no such entry", entry_id)
            owner, before = found
            if num_bytes > before:
                self._check(connection, owner, num_bytes - before)
                connection.execute("UPDATE entries SET bytes = ? WHERE id = ?", (num_bytes, entry_id))

    def lower_to(self, entry_id: str, num_bytes: int) -> None:
        """It takes no more than so many from now on. May be repeated."""
        with self._transaction() as connection:
            connection.execute("UPDATE entries SET bytes = MIN(bytes, ?) WHERE id = ?", (num_bytes, entry_id))

    def replace(self, entries: Iterable[Entry], gone_ids: Iterable[str] = ()) -> None:
        """Count what is there by now, whatever room there is, in place of what is gone."""
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
        """Their records, the newest first unless `ascending`. None: `after` is none of them."""
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
        """At most so many of each owner: those that are being cancelled first, then the oldest."""
        rows = self._select(
            "SELECT id, owner, created_ns, is_cancelling FROM (SELECT *, ROW_NUMBER() OVER "
            "(PARTITION BY owner ORDER BY is_cancelling DESC, created_ns) AS place FROM entries WHERE is_open) "
            "WHERE place <= ?",
            per_owner,
        )
        return [OpenBatch(row[0], row[1], row[2], bool(row[3])) for row in rows]

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
        """The lock of one gateway at a time."""
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
    """An error of SQLite's file is told as that of any other file."""
    try:
        yield
    except sqlite3.Error as error:
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise OSError(errno.ENOSPC if is_full else errno.EIO, f"the catalog of files: {error}") from error
