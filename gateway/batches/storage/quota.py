"""The disk quota of all files and batches, in total and per owner. Pure."""

from dataclasses import dataclass
from typing import Literal


class StorageFull(Exception):
    """A quota does not allow another file or batch, or more bytes.

    Attributes:
        message: For the owner; it names the limit.
        code: An error code of the API.
    """

    def __init__(self, message: str, code: Literal["files_full", "too_many_batches"] = "files_full") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True, slots=True)
class Quota:
    """Disk quota of all files and batches.

    Without `max_bytes_per_key`, a key may hold as many bytes as it leaves free: one key alone gets half, two get a
    third each. A new key therefore always finds space.
    """

    max_bytes: int
    max_bytes_per_key: int | None = None

    def check(self, owner: str, more: int, used: int, used_by_owner: int) -> None:
        """Raise StorageFull unless `owner` may take `more` bytes.

        Without API keys there is one owner, "", who may take everything.
        """
        free = self.max_bytes - used - more
        if free < 0:
            raise StorageFull(
                f"No space for {more} bytes: files and batches use {used} of {self.max_bytes} bytes. "
                "Delete files, or retry after others have expired."
            )
        limit = self.max_bytes_per_key
        if limit is None:
            limit = free + used_by_owner + more if not owner else max(free, 0)
        if used_by_owner + more > limit:
            raise StorageFull(
                f"No space for {more} bytes: files and batches of this key use {used_by_owner} bytes, of at most "
                f"{limit} now. Delete files or ended batches."
            )
