"""Batches in a directory, one folder each. Blocking.

    batch.json      BatchRecord, never changed
    input.jsonl     the uploaded file under a second name, so that deleting that one does not harm; gone at the end
    progress.json   BatchProgress, written by whoever holds `lock`
    lock            held by the one gateway that drives the batch; the kernel drops it with the process; in it,
                    how many holders ended without a word
    unknown-since   when its owner's key was first missing; gone when the key is back
    cancel          there as soon as somebody cancels it; any gateway may write it
    output.jsonl, errors.jsonl   results as they come; they become files at the end
"""

import os
import shutil
import time
from pathlib import Path

import msgspec

from gateway.batches.disk import Lease, make_private, sync_directory, try_lock, write_whole
from gateway.batches.records import (
    BatchBody,
    BatchProgress,
    BatchRecord,
    Metadata,
    batch_body,
    is_batch_id,
    new_batch_id,
    new_file_id,
)

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
        """Since a gateway with keys first saw that it has not the owner's; counted on if gateways end meanwhile."""
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
    def __init__(self, directory: Path) -> None:
        self._directory = directory / "batches"

    def prepare(self) -> None:
        make_private(self._directory)

    def create(
        self,
        owner_key_hash: str,
        endpoint: str,
        input_file_id: str,
        input_path: Path,
        completion_window: str,
        metadata: Metadata | None,
    ) -> BatchFolder:
        """Raises FileNotFoundError if the input was deleted meanwhile."""
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
        )
        folder = BatchFolder(self._directory / record.id, record)
        make_private(folder.path)
        try:
            os.link(input_path, folder.input_path)
            write_whole(folder.path / "batch.json", msgspec.json.encode(record))
        except BaseException:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        sync_directory(self._directory)
        return folder

    def names(self) -> list[str]:
        return [entry.name for entry in os.scandir(self._directory) if is_batch_id(entry.name)]

    def open(self, batch_id: str) -> BatchFolder | None:
        """None also while it is being made."""
        path = self._directory / batch_id
        try:
            return BatchFolder(path, _record_decoder.decode((path / "batch.json").read_bytes()))
        except FileNotFoundError:
            return None

    def find(self, batch_id: str, owner_key_hash: str) -> BatchFolder | None:
        folder = self.open(batch_id) if is_batch_id(batch_id) else None
        return folder if folder is not None and folder.record.owner_key_hash == owner_key_hash else None

    def list(self, owner_key_hash: str) -> list[BatchFolder]:
        """Newest first."""
        folders = [folder for name in self.names() if (folder := self.find(name, owner_key_hash))]
        return sorted(folders, key=lambda folder: (folder.record.created_ns, folder.record.id), reverse=True)
