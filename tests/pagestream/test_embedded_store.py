"""The embedded Valkey: private, durable, attaches to a live one, never outlives us by accident."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from pagestream.embedded_store import MAX_SOCKET_PATH_BYTES, EmbeddedStore, StoreError, private_directory
from tests.patience import PATIENCE_SECONDS

MEMORY_BYTES = 64 * 2**20


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ps-") as path:  # tmp_path is too long for a socket
        yield Path(path) / "store"


def client(store: EmbeddedStore) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(store.socket_path))


async def test_the_server_is_private_durable_and_refuses_rather_than_deletes(directory: Path) -> None:
    store = EmbeddedStore.at(directory, MEMORY_BYTES)
    assert await store.start() is True
    with client(store) as connection:
        settings = connection.config_get("*")
        pid = connection.info("server")["process_id"]
    expected = {
        "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction",
        "maxmemory": str(MEMORY_BYTES), "port": "0",
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert [c for c in psutil.Process(pid).net_connections() if c.family != socket.AF_UNIX] == []
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.socket_path.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in directory.rglob("*"))
    await store.stop()
    assert not psutil.pid_exists(pid)


async def test_what_was_written_is_there_after_a_restart_and_after_a_kill(directory: Path) -> None:
    store = EmbeddedStore.at(directory, MEMORY_BYTES)
    await store.start()
    with client(store) as connection:
        connection.set("a", "1")
    await store.stop()
    await store.start()
    assert store.process is not None
    with client(store) as connection:
        connection.set("b", "2")
    store.process.kill()
    await store.wait_until_gone()
    await store.start()
    with client(store) as connection:
        assert connection.mget("a", "b") == [b"1", b"2"]
    await store.stop()


async def test_a_live_server_is_used_and_left_running(directory: Path) -> None:
    first, second = EmbeddedStore.at(directory, MEMORY_BYTES), EmbeddedStore.at(directory, MEMORY_BYTES)
    await first.start()
    assert await second.start() is False
    await second.stop()
    assert await first.is_alive()
    await first.stop()
    assert not await first.is_alive()


async def test_of_two_that_begin_at_once_one_attaches(directory: Path) -> None:
    stores = [EmbeddedStore.at(directory, MEMORY_BYTES) for _ in range(2)]
    assert sorted(await asyncio.gather(*(store.start() for store in stores))) == [False, True]
    for store in stores:
        await store.stop()


async def test_the_end_of_a_foreign_server_is_noticed(directory: Path) -> None:
    first, second = EmbeddedStore.at(directory, MEMORY_BYTES), EmbeddedStore.at(directory, MEMORY_BYTES)
    await first.start()
    await second.start()
    await first.stop()
    assert "is gone" in await second.wait_until_gone()


async def test_a_server_that_cannot_start_tells_why(directory: Path) -> None:
    directory.mkdir()
    (directory / "appendonlydir").write_text("in the way")
    with pytest.raises(StoreError, match="exited during its start"):
        await EmbeddedStore.at(directory, MEMORY_BYTES).start()


def test_the_directory_is_closed_to_others(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    private_directory(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_foreign_directory_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(StoreError, match="belongs to another user"):
        private_directory(directory)


def test_a_long_path_gets_a_short_socket() -> None:
    deep = Path("/home/someone") / ("x" * 100)
    path = EmbeddedStore.at(deep, 1).socket_path
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
    assert path == EmbeddedStore.at(deep, 1).socket_path
    assert path.parent != EmbeddedStore.at(deep / "y", 1).socket_path.parent


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_a_killed_owner_takes_the_server_along(directory: Path) -> None:
    owner = f"""
import asyncio
from pathlib import Path
from pagestream.embedded_store import EmbeddedStore
async def main():
    store = EmbeddedStore.at(Path({str(directory)!r}), {MEMORY_BYTES})
    await store.start()
    print(store.process.process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        _gone, alive = psutil.wait_procs([server], timeout=PATIENCE_SECONDS)
    assert alive == []
