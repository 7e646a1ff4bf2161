"""Stored records of files and batches, and their form in OpenAI's API. Pure.

files/<id>.json     FileRecord     beside it files/<id>.jsonl, the content
batches/<id>/       batch.json = BatchRecord, progress.json = BatchProgress; batch_store.py lists the other files
"""

import re
import secrets
import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset(("failed", "completed", "cancelled"))

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner_key_hash: str
    filename: str
    purpose: Purpose
    num_bytes: int
    created_ns: int  # Unix time; defines the order of lists
    expires_at: int | None = None  # Unix seconds; None in records of early releases, where files did not expire


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The constant part of a batch. The ids of its result files are chosen here, so any driver can finish it."""

    id: str
    owner_key_hash: str
    created_ns: int
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Metadata | None
    output_file_id: str
    error_file_id: str
    output_expires_seconds: int | None = None


class BatchProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A reason why a batch failed, with the line of its input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Resume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The position where a batch that yielded continues; earlier lines need not be read again."""

    number: int = 1  # first line without a result
    offset: int = 0  # of that line, in bytes
    done: list[int] = []  # later lines that already have results
    output_bytes: int = 0
    error_bytes: int = 0
    completed: int = 0
    failed: int = 0


class BatchProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """State of a batch, written only by its driver. Times are Unix seconds."""

    status: Status = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    problems: list[BatchProblem] = []
    resume: Resume = Resume()
    failure_bytes: int = 0  # size of the results if every line only had an error of the batch
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelled_at: int | None = None
    has_output: bool = False
    has_errors: bool = False

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class FileBody(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    expires_at: int | None = None
    status_details: None = None


class DeletedBody(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file", "batch"] = "file"
    deleted: bool = True


class FileListBody(msgspec.Struct, kw_only=True):
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class BatchErrors(msgspec.Struct, kw_only=True):
    data: list[BatchProblem]
    object: Literal["list"] = "list"


class BatchCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchBody(msgspec.Struct, kw_only=True):
    id: str
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: Metadata | None
    object: Literal["batch"] = "batch"
    expires_at: None = None  # batches have no deadline
    expired_at: None = None


class BatchListBody(msgspec.Struct, kw_only=True):
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


def is_file_id(text: str) -> bool:
    """Return whether `text` has the form of a file id; nothing else becomes part of a path."""
    return _FILE_ID.fullmatch(text) is not None


def may_name_batch(text: str) -> bool:
    return _BATCH_ID.fullmatch(text) is not None


def file_body(record: FileRecord) -> FileBody:
    return FileBody(
        id=record.id,
        bytes=record.num_bytes,
        created_at=record.created_ns // 10**9,
        filename=record.filename,
        purpose=record.purpose,
        expires_at=record.expires_at,
    )


def batch_body(record: BatchRecord, progress: BatchProgress, cancelling_at: int | None) -> BatchBody:
    is_cancelling = cancelling_at is not None and not progress.has_ended
    return BatchBody(
        id=record.id,
        endpoint=record.endpoint,
        errors=BatchErrors(data=progress.problems) if progress.problems else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status="cancelling" if is_cancelling else progress.status,
        output_file_id=record.output_file_id if progress.has_output else None,
        error_file_id=record.error_file_id if progress.has_errors else None,
        created_at=record.created_ns // 10**9,
        in_progress_at=progress.in_progress_at,
        finalizing_at=progress.finalizing_at,
        completed_at=progress.completed_at,
        failed_at=progress.failed_at,
        cancelling_at=cancelling_at,
        cancelled_at=progress.cancelled_at,
        request_counts=BatchCounts(total=progress.total, completed=progress.completed, failed=progress.failed),
        metadata=record.metadata,
    )


def unix_seconds() -> int:
    return int(time.time())
