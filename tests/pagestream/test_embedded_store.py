"""The embedded Valkey: private, durable, attaches to a live server, and ends with its owner."""

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
    with tempfile.TemporaryDirectory(prefix="ps-") as path:  # tmp_path is too long for a unix socket
        yield Path(path) / "store"


def client(store: EmbeddedStore) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(store.socket_path))


async def test_server_is_private_durable_and_never_evicts(directory: Path) -> None:
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


async def test_written_data_survives_restart_and_kill(directory: Path) -> None:
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


async def test_live_server_is_used_and_left_running(directory: Path) -> None:
    first, second = EmbeddedStore.at(directory, MEMORY_BYTES), EmbeddedStore.at(directory, MEMORY_BYTES)
    await first.start()
    assert await second.start() is False
    await second.stop()
    assert await first.is_alive()
    await first.stop()
    assert not await first.is_alive()


async def test_second_of_two_simultaneous_starts_attaches(directory: Path) -> None:
    stores = [EmbeddedStore.at(directory, MEMORY_BYTES) for _ in range(2)]
    assert sorted(await asyncio.gather(*(store.start() for store in stores))) == [False, True]
    for store in stores:
        await store.stop()


async def test_end_of_an_attached_server_is_noticed(directory: Path) -> None:
    first, second = EmbeddedStore.at(directory, MEMORY_BYTES), EmbeddedStore.at(directory, MEMORY_BYTES)
    await first.start()
    await second.start()
    await first.stop()
    assert "is gone" in await second.wait_until_gone()


async def test_unstartable_server_reports_the_reason(directory: Path) -> None:
    directory.mkdir()
    (directory / "appendonlydir").write_text("in the way")
    with pytest.raises(StoreError, match="exited during its start"):
        await EmbeddedStore.at(directory, MEMORY_BYTES).start()


def test_directory_is_closed_to_other_users(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    private_directory(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(StoreError, match="belongs to another user"):
        private_directory(directory)


def test_long_path_gets_a_short_socket() -> None:
    deep = Path("/home/someone") / ("x" * 100)
    path = EmbeddedStore.at(deep, 1).socket_path
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
    assert path == EmbeddedStore.at(deep, 1).socket_path
    assert path.parent != EmbeddedStore.at(deep / "y", 1).socket_path.parent


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_server_ends_with_its_killed_owner(directory: Path) -> None:
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
