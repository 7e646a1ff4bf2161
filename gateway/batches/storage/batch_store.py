"""Batches in a directory, one folder each. Blocking.

batch.json      BatchRecord, never changed
input.jsonl     hard link to the uploaded file, so that deleting the upload does no harm; removed at the end
progress.json   BatchProgress, written by the holder of `lock`
lock            held by the one driver of the batch; the kernel releases it with the process. It contains the
                number of holders that ended without releasing it
unknown-since   time when the owner's key was first missing; removed when the key is back
cancel          exists once the batch is cancelled; a gateway or a driver creates it
output.jsonl, errors.jsonl   results as they arrive; they become files at the end
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

import msgspec

from gateway.batches.storage.catalog import Catalog, Entry, OpenBatch
from gateway.batches.storage.disk import ENTRY_BYTES, Lease, make_private, sync_directory, try_lock, write_whole
from gateway.batches.storage.quota import StorageFull
from gateway.batches.storage.records import (
    BatchBody,
    BatchProgress,
    BatchRecord,
    Metadata,
    batch_body,
    may_name_batch,
    new_batch_id,
    new_file_id,
)

_ENDED_BYTES = 4 * ENTRY_BYTES
MAX_BATCHES_PER_KEY = 10_000  # each keeps a folder of small files until it is deleted or expires

_record_decoder = msgspec.json.Decoder(BatchRecord)
_progress_decoder = msgspec.json.Decoder(BatchProgress)


class BatchFolder:
    def __init__(self, path: Path, record: BatchRecord) -> None:
        self.path = path
        self.record = record
        self.input_path = path / "input.jsonl"
        self.output_path = path / "output.jsonl"
        self.errors_path = path / "errors.jsonl"
        self._progress_path = path / "progress.json"
        self._cancel_path = path / "cancel"
        self._unknown_path = path / "unknown-since"

    @property
    def is_cancelling(self) -> bool:
        return self._cancel_path.exists()

    def cancel(self) -> None:
        if not self.is_cancelling:
            write_whole(self._cancel_path, str(int(time.time())).encode())

    def read_progress(self) -> BatchProgress:
        try:
            return _progress_decoder.decode(self._progress_path.read_bytes())
        except FileNotFoundError:
            return BatchProgress()

    def write_progress(self, progress: BatchProgress, *, is_durable: bool = True) -> None:
        write_whole(self._progress_path, msgspec.json.encode(progress), is_durable=is_durable)

    def try_lock(self) -> Lease | None:
        descriptor = try_lock(self.path / "lock")
        return None if descriptor is None else Lease(descriptor)

    def seconds_without_key(self) -> float:
        """Return the seconds since a driver first found the owner's key missing; the time survives restarts."""
        try:
            return time.time() - int(self._unknown_path.read_bytes())
        except FileNotFoundError:
            write_whole(self._unknown_path, str(int(time.time())).encode())
            return 0.0

    def has_key(self) -> None:
        self._unknown_path.unlink(missing_ok=True)

    def body(self) -> BatchBody:
        cancelling_at = int(self._cancel_path.read_bytes()) if self.is_cancelling else None
        return batch_body(self.record, self.read_progress(), cancelling_at)


class BatchStore:
    def __init__(self, directory: Path, catalog: Catalog, retention_seconds: int) -> None:
        self._directory = directory / "batches"
        self._catalog = catalog
        self._retention_seconds = retention_seconds
        make_private(self._directory)

    def create(
        self,
        owner_key_hash: str,
        endpoint: str,
        input_file_id: str,
        input_path: Path,
        completion_window: str,
        metadata: Metadata | None,
        output_expires_seconds: int | None = None,
    ) -> BatchFolder:
        """Create a batch and reserve its space.

        Raises:
            FileNotFoundError: If the input was deleted meanwhile.
            StorageFull: If the quota or the number of batches is exhausted.
            OSError: If the disk fails.
        """
        record = BatchRecord(
            id=new_batch_id(),
            owner_key_hash=owner_key_hash,
            created_ns=time.time_ns(),
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            metadata=metadata,
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            output_expires_seconds=output_expires_seconds,
        )
        folder = BatchFolder(self._directory / record.id, record)
        make_private(folder.path)
        try:
            os.link(input_path, folder.input_path)
            entry = _open_entry(folder)
            if not self._catalog.begin(entry, max_of_kind=MAX_BATCHES_PER_KEY):
                message = f"This key has {MAX_BATCHES_PER_KEY} batches, the maximum. Delete ended batches."
                raise StorageFull(message, code="too_many_batches")
            write_whole(folder.path / "batch.json", msgspec.json.encode(record))
        except BaseException:
            shutil.rmtree(folder.path, ignore_errors=True)
            self._catalog.delete(record.id)
            raise
        sync_directory(self._directory)
        return folder

    def reserve(self, folder: BatchFolder, result_bytes: int) -> None:
        """Reserve space for `result_bytes` of results in total; raise StorageFull or OSError."""
        self._catalog.raise_to(folder.record.id, _open_bytes(folder) + result_bytes)

    def release(self, folder: BatchFolder) -> None:
        """Release the space of its input and results. Idempotent.

        Call it before the end becomes visible, so that a client that sees the end also finds the space. If the driver
        stops in between, the next one reserves again what it needs.
        """
        self._catalog.lower_to(folder.record.id, _ENDED_BYTES)

    def end(self, folder: BatchFolder) -> None:
        """Mark it as ended in the catalog; it then counts only the space of its folder. Idempotent."""
        self._catalog.replace([self._ended_entry(folder)])

    def cancel(self, folder: BatchFolder) -> None:
        folder.cancel()
        self._catalog.set_cancelling(folder.record.id)

    def open_batches(self, per_owner: int) -> list[OpenBatch]:
        return self._catalog.open_batches(per_owner)

    def open(self, batch_id: str) -> BatchFolder | None:
        """Return the batch, or None if it does not exist or is still being created."""
        path = self._directory / batch_id
        try:
            return BatchFolder(path, _record_decoder.decode((path / "batch.json").read_bytes()))
        except FileNotFoundError:
            return None

    def find(self, batch_id: str, owner_key_hash: str) -> BatchFolder | None:
        folder = self.open(batch_id) if may_name_batch(batch_id) else None
        return folder if folder is not None and folder.record.owner_key_hash == owner_key_hash else None

    def page(self, owner_key_hash: str, *, limit: int, after: str | None) -> list[BatchFolder] | None:
        """Return a page, newest first, or None if `after` is unknown."""
        records = self._catalog.page(owner_key_hash, "batch", limit=limit, after=after)
        if records is None:
            return None
        found = [_record_decoder.decode(record) for record in records]
        return [BatchFolder(self._directory / record.id, record) for record in found]

    def delete(self, batch_id: str) -> None:
        """Delete an ended batch; the files with its results stay."""
        with contextlib.suppress(FileNotFoundError):
            (self._directory / batch_id / "batch.json").unlink()  # from here on the batch does not exist
        shutil.rmtree(self._directory / batch_id, ignore_errors=True)
        self._catalog.delete(batch_id)

    def reconcile(self) -> None:
        """Add batches that the catalog lacks and drop those that are gone, for example after manual changes."""
        there = {entry.name for entry in os.scandir(self._directory) if may_name_batch(entry.name)}
        listed = self._catalog.ids("batch")
        folders = [folder for name in there - listed if (folder := self.open(name)) is not None]
        self._catalog.replace(
            [
                self._ended_entry(folder) if folder.read_progress().has_ended else _open_entry(folder)
                for folder in folders
            ],
            [name for name in listed - there if not (self._directory / name).exists()],
        )

    def sweep(self, limit: int) -> None:
        """Delete up to `limit` expired batches."""
        for batch_id in self._catalog.expired("batch", time.time(), limit):
            self.delete(batch_id)

    def _ended_entry(self, folder: BatchFolder) -> Entry:
        expires_at = int(time.time()) + self._retention_seconds
        return _entry(folder, _ENDED_BYTES, expires_at=expires_at, is_open=False)


def _open_entry(folder: BatchFolder) -> Entry:
    return _entry(folder, _open_bytes(folder), expires_at=None, is_open=True)


def _open_bytes(folder: BatchFolder) -> int:
    """Return the bytes of the input, which the uploaded file may share, and of eight small files."""
    try:
        return folder.input_path.stat().st_size + 8 * ENTRY_BYTES
    except FileNotFoundError:
        return 8 * ENTRY_BYTES


def _entry(folder: BatchFolder, num_bytes: int, *, expires_at: int | None, is_open: bool) -> Entry:
    record = folder.record
    return Entry(
        id=record.id,
        kind="batch",
        owner=record.owner_key_hash,
        created_ns=record.created_ns,
        num_bytes=num_bytes,
        record=msgspec.json.encode(record),
        expires_at=expires_at,
        is_open=is_open,
    )
