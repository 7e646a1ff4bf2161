"""Uploaded files and results of batches in a directory; a file is visible only to the key that owns it. Blocking.

files/<id>.json    its record, written last and deleted first; a file without a record does not exist
files/<id>.jsonl   its content
parts/<id>         an upload in progress, locked by the process that receives it
"""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.batches.storage.catalog import Catalog, Entry
from gateway.batches.storage.disk import ENTRY_BYTES, make_private, sync_directory, try_lock, write_whole
from gateway.batches.storage.quota import StorageFull
from gateway.batches.storage.records import FileRecord, Purpose, is_file_id, new_file_id

ORPHAN_SECONDS = 60.0  # an unlocked part of this age was abandoned
_decoder = msgspec.json.Decoder(FileRecord)


class Part:
    """An upload in progress. Always close it, whether it was opened and kept or not."""

    def __init__(self, catalog: Catalog, path: Path, owner_key_hash: str) -> None:
        self.path = path
        self.owner_key_hash = owner_key_hash
        self.num_bytes = 0
        self._catalog = catalog
        self._num_reserved = 0
        self._descriptor: int | None = None

    def open(self, num_bytes: int) -> None:
        """Create the file and reserve `num_bytes`; raise StorageFull or OSError."""
        self._descriptor = try_lock(self.path)
        assert self._descriptor is not None, "the name is random"
        self._catalog.begin(
            Entry(
                id=self.path.name, kind="part", owner=self.owner_key_hash, created_ns=time.time_ns(),
                num_bytes=num_bytes + 2 * ENTRY_BYTES,
            )
        )  # fmt: skip
        self._num_reserved = num_bytes

    def write(self, data: bytes, *, more: int) -> None:
        """Append data; if the reservation is used up, reserve `more` bytes. Raise StorageFull or OSError."""
        assert self._descriptor is not None
        needed = self.num_bytes + len(data)
        if needed > self._num_reserved:
            try:
                self._reserve(needed + more)
            except StorageFull:
                self._reserve(needed)  # the exact size may still fit
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self.num_bytes = needed

    def _reserve(self, num_bytes: int) -> None:
        self._catalog.raise_to(self.path.name, num_bytes + 2 * ENTRY_BYTES)
        self._num_reserved = num_bytes

    def sync(self) -> None:
        assert self._descriptor is not None
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self.path.unlink(missing_ok=True)
            os.close(descriptor)
            self._catalog.delete(self.path.name)


class FileStore:
    def __init__(self, directory: Path, catalog: Catalog, retention_seconds: int) -> None:
        self._files = directory / "files"
        self._parts = directory / "parts"
        self._catalog = catalog
        self._retention_seconds = retention_seconds
        for folder in (self._files, self._parts):
            make_private(folder)

    def new_part(self, owner_key_hash: str) -> Part:
        """Return a part that is not open yet."""
        return Part(self._catalog, self._parts / f"part-{secrets.token_hex(16)}", owner_key_hash)

    def keep(self, part: Part, filename: str, purpose: Purpose, expires_seconds: int | None = None) -> FileRecord:
        """Turn a complete upload into a file; `expires_seconds` may shorten the retention."""
        part.sync()
        return self._keep(part.path, new_file_id(), part.owner_key_hash, filename, purpose, expires_seconds)

    def adopt(
        self, path: Path, file_id: str, owner_key_hash: str, filename: str, purpose: Purpose,
        expires_seconds: int | None = None,
    ) -> None:  # fmt: skip
        """Turn a file at `path` in the directory into the file `file_id`. Idempotent."""
        if path.exists():
            self._keep(path, file_id, owner_key_hash, filename, purpose, expires_seconds)

    def find(self, file_id: str, owner_key_hash: str) -> FileRecord | None:
        record = self._read(file_id) if is_file_id(file_id) else None
        return record if record is not None and record.owner_key_hash == owner_key_hash else None

    def page(
        self, owner_key_hash: str, *, limit: int, purpose: str | None, after: str | None, ascending: bool
    ) -> list[FileRecord] | None:
        """Return a page, or None if `after` is unknown."""
        records = self._catalog.page(
            owner_key_hash, "file", limit=limit, purpose=purpose, after=after, ascending=ascending
        )
        return None if records is None else [_decoder.decode(record) for record in records]

    def content_path(self, file_id: str) -> Path:
        return self._files / f"{file_id}.jsonl"

    def delete(self, file_id: str) -> None:
        """Delete a file; a batch that reads it continues, because it has its own link to the content."""
        self._record_path(file_id).unlink(missing_ok=True)
        self.content_path(file_id).unlink(missing_ok=True)
        self._catalog.delete(file_id)

    def reconcile(self) -> None:
        """Add files that the catalog lacks and drop those that are gone, for example after manual changes."""
        there = {path.stem for path in self._files.glob("*.json")}
        listed = self._catalog.ids("file")
        records = [record for name in there - listed if is_file_id(name) and (record := self._read(name))]
        now = int(time.time())  # retention of a file new to the catalog starts now
        self._catalog.replace(
            [self._entry(record, now + self._retention_seconds) for record in records],
            [name for name in listed - there if self._read(name) is None],
        )

    def sweep(self, limit: int) -> None:
        """Delete up to `limit` expired files, and abandoned uploads."""
        for file_id in self._catalog.expired("file", time.time(), limit):
            self.delete(file_id)
        for path in self._parts.iterdir():
            with suppress(FileNotFoundError):
                self._sweep_part(path)
        self._catalog.delete(*(self._catalog.ids("part") - {path.name for path in self._parts.iterdir()}))

    def _sweep_part(self, path: Path) -> None:
        if time.time() - path.stat().st_mtime < ORPHAN_SECONDS:
            return
        descriptor = try_lock(path)
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _keep(
        self, path: Path, file_id: str, owner_key_hash: str, filename: str, purpose: Purpose,
        expires_seconds: int | None,
    ) -> FileRecord:  # fmt: skip
        now = time.time_ns()
        seconds = min(expires_seconds or self._retention_seconds, self._retention_seconds)
        record = FileRecord(
            id=file_id,
            owner_key_hash=owner_key_hash,
            filename=filename,
            purpose=purpose,
            num_bytes=path.stat().st_size,
            created_ns=now,
            expires_at=now // 10**9 + seconds,
        )
        with suppress(FileExistsError):  # an earlier adoption stopped after this line
            os.link(path, self.content_path(file_id))
        try:
            sync_directory(self._files)
            write_whole(self._record_path(file_id), msgspec.json.encode(record))
            self._catalog.replace([self._entry(record, record.expires_at)])
        except OSError:  # undo; the source stays
            self._record_path(file_id).unlink(missing_ok=True)
            self.content_path(file_id).unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)
        return record

    def _entry(self, record: FileRecord, expires_at: int | None) -> Entry:
        record = msgspec.structs.replace(record, expires_at=record.expires_at or expires_at)
        return Entry(
            id=record.id,
            kind="file",
            owner=record.owner_key_hash,
            created_ns=record.created_ns,
            num_bytes=record.num_bytes + 2 * ENTRY_BYTES,
            purpose=record.purpose,
            record=msgspec.json.encode(record),
            expires_at=record.expires_at,
        )

    def _read(self, file_id: str) -> FileRecord | None:
        try:
            return _decoder.decode(self._record_path(file_id).read_bytes())
        except FileNotFoundError:
            return None

    def _record_path(self, file_id: str) -> Path:
        return self._files / f"{file_id}.json"
