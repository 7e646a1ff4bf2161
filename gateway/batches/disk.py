"""The file system as files and batches need it: whole writes, locks that end with their process, sizes. Blocking.

The directory may be shared by gateways of one machine, or of several if its file system has flock and rename.

Beside the walks, under every other file here. It knows no file's meaning.
"""

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

ENTRY_BYTES = 4096  # what an entry costs at least: many small ones fill a disk too
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


async def to_the_end(function: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    """In a thread, waited for also by a task that is cancelled: a lock must not be let go while it still writes."""
    return await ended(asyncio.to_thread(function, *args, **kwargs))


async def ended(work: Coroutine[Any, Any, _Result]) -> _Result:
    """As to_the_end() waits, for work that is done elsewhere."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
    finally:
        del running  # its error has this frame, which would have it: a circle that holds a refused body for long


def make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_whole(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """After this all of it is under its name, and on the disk if it is to be durable; before, nothing of it."""
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
    """A descriptor that holds the lock until it is closed, also by the end of its process; None: another one has it."""
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
    """A lock that is held. Its file counts the holders that did not end it: their processes were killed, or hung until
    they were. That is written in place, which a full disk does not hinder."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        found = os.pread(descriptor, 8, 0)
        self.num_strikes = int(found) if found.isdigit() else 0
        self._write(self.num_strikes + 1)

    def forgive(self) -> None:
        """Whatever ends the process from here on, it was not what is done under the lock."""
        self._write(0)

    def end(self) -> None:
        try:
            self.forgive()
        finally:
            os.close(self._descriptor)

    def _write(self, num_strikes: int) -> None:
        os.pwrite(self._descriptor, b"%08d" % num_strikes, 0)
