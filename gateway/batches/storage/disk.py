"""File system primitives for files and batches: atomic writes, locks that end with their process, and sizes. Blocking.

Gateways on one machine may share the directory; on several machines its file system needs flock and atomic rename.
"""

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

ENTRY_BYTES = 4096  # minimum cost of an entry, because many small files fill a disk too
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


async def to_the_end(function: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    """Run `function` in a thread and wait for it even if the task is cancelled, so that locks outlive the writes."""
    return await ended(asyncio.to_thread(function, *args, **kwargs))


async def ended(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Wait for `work` even if the task is cancelled."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
    finally:
        del running  # breaks a cycle between the error and this frame, which would keep a refused body alive


def make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_whole(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Write a file atomically; if `is_durable`, it is on disk when this returns."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock until it is closed or its process ends, or None if it is taken."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Lease:
    """A held lock whose file counts the holders that ended without releasing it, because they crashed or hung.

    The count is overwritten in place, so a full disk does not prevent it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        found = os.pread(descriptor, 8, 0)
        self.num_crashes = int(found) if found.isdigit() else 0
        self._write(self.num_crashes + 1)

    def forgive(self) -> None:
        """Reset the count: a later crash of the process is not caused by the work under the lock."""
        self._write(0)

    def end(self) -> None:
        try:
            self.forgive()
        finally:
            os.close(self._descriptor)

    def _write(self, num_crashes: int) -> None:
        os.pwrite(self._descriptor, b"%08d" % num_crashes, 0)
