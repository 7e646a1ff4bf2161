"""Uploaded files and results of batches in a directory. Whoever shows another key than the owner finds none. Blocking.

    files/<id>.json    its record, written last and deleted first: what has none is no file
    files/<id>.jsonl   its content
    parts/<random>     an upload on its way, locked by the process that receives it
"""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from gateway.batches.disk import make_private, sync_directory, try_lock, used_bytes, write_whole
from gateway.batches.records import FileRecord, Purpose, is_file_id, new_file_id

_decoder = msgspec.json.Decoder(FileRecord)


class Part:
    """An upload on its way. Close it, kept or not."""

    def __init__(self, path: Path) -> None:
        descriptor = try_lock(path)
        assert descriptor is not None, "the name is random"
        self.path = path
        self.num_bytes = 0
        self._file: BinaryIO = os.fdopen(descriptor, "wb")

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.num_bytes += len(data)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


class FileStore:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = directory / "files"
        self._parts = directory / "parts"

    def prepare(self) -> None:
        """Also sweeps out what uploads to dead gateways left behind."""
        for folder in (self._directory, self._files, self._parts):
            make_private(folder)
        for path in self._parts.iterdir():
            descriptor = try_lock(path)
            if descriptor is not None:
                path.unlink(missing_ok=True)
                os.close(descriptor)

    def used_bytes(self) -> int:
        """Of all files, uploads on their way and batches."""
        return used_bytes(self._directory)

    def begin(self) -> Part:
        return Part(self._parts / secrets.token_hex(16))

    def keep(self, part: Part, owner_key_hash: str, filename: str, purpose: Purpose) -> FileRecord:
        """An upload that has come whole becomes a file."""
        part.sync()
        return self._keep(part.path, new_file_id(), owner_key_hash, filename, purpose)

    def adopt(self, path: Path, file_id: str, owner_key_hash: str, filename: str, purpose: Purpose) -> None:
        """A file written elsewhere in the directory, whose id is known beforehand. May be repeated."""
        if path.exists():
            self._keep(path, file_id, owner_key_hash, filename, purpose)

    def find(self, file_id: str, owner_key_hash: str) -> FileRecord | None:
        record = self._read(file_id) if is_file_id(file_id) else None
        return record if record is not None and record.owner_key_hash == owner_key_hash else None

    def list(self, owner_key_hash: str) -> list[FileRecord]:
        """Newest first."""
        names = [path.stem for path in self._files.glob("*.json")]
        records = [record for name in names if (record := self.find(name, owner_key_hash))]
        return sorted(records, key=lambda record: (record.created_ns, record.id), reverse=True)

    def content_path(self, file_id: str) -> Path:
        return self._files / f"{file_id}.jsonl"

    def delete(self, file_id: str) -> None:
        """A batch that reads it goes on: it has a name of its own for the content."""
        self._record_path(file_id).unlink(missing_ok=True)
        self.content_path(file_id).unlink(missing_ok=True)

    def _keep(self, path: Path, file_id: str, owner_key_hash: str, filename: str, purpose: Purpose) -> FileRecord:
        record = FileRecord(
            id=file_id,
            owner_key_hash=owner_key_hash,
            filename=filename,
            purpose=purpose,
            num_bytes=path.stat().st_size,
            created_ns=time.time_ns(),
        )
        with suppress(FileExistsError):  # an adoption that was cut off between the two
            os.link(path, self.content_path(file_id))
        sync_directory(self._files)
        write_whole(self._record_path(file_id), msgspec.json.encode(record))
        path.unlink(missing_ok=True)
        return record

    def _read(self, file_id: str) -> FileRecord | None:
        try:
            return _decoder.decode(self._record_path(file_id).read_bytes())
        except FileNotFoundError:
            return None

    def _record_path(self, file_id: str) -> Path:
        return self._files / f"{file_id}.json"
