"""Checks of `pagestream doctor` for the store: reachable, recent, safe for requests, and its clock. Read-only."""

import re
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from pagestream.embedded_store import StoreError
from pagestream.finding import Finding
from pagestream.store_permissions import check_permissions
from shared.cluster_nodes import ClusterNodes
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from shared.sentinels import PrimaryReport, Sentinels

REDIS_MINIMUM = (7, 0)
NUM_CLOCK_READINGS = 5  # the one with the fastest reply counts
# Queue times and traces compare the store's clock with a worker's; a smaller skew does not matter there.
CLOCK_SKEW_SECONDS = 0.5
MAX_LAG_BYTES = 2**20  # of a replica
# Workers fence themselves after 10 s without the store (two thirds of --dead-after-seconds); an election takes 3 s.
MAX_DOWN_AFTER_SECONDS = 7.0


@dataclass(frozen=True)
class ClockReading:
    skew_seconds: float  # store's clock minus this machine's; accurate to half a round trip
    round_trip_seconds: float


def check_embedded_store(find_binary: Callable[[], Path]) -> list[Finding]:
    try:
        binary = find_binary()
        command = [str(binary), "--version"]
        version = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (StoreError, OSError, subprocess.SubprocessError) as error:
        return [Finding("store", "fail", str(error), "or use a running server with --redis-url")]
    return [
        Finding("store", "ok", f"embedded: {' '.join(version.split()[:3])}, AOF each second, noeviction"),
        Finding("clock", "ok", "the embedded store uses this machine's"),
    ]


async def check_redis(url: str) -> list[Finding]:
    connections = connect(url)
    finder = connections.finder
    reports = await finder.reports() if isinstance(finder, Sentinels) else []
    try:
        server = await connections.commands.info("server")
        memory = await connections.commands.info("memory")
        persistence = await connections.commands.info("persistence")
        replication = await connections.commands.info("replication")
        cluster = await connections.commands.info("cluster")
        database = await check_database(connections.subscriber)
        permissions = await check_permissions(connections.commands)
        clock = await read_clock(connections.commands.time)
    except (RedisError, OSError, ValueError) as error:
        return [
            *judge_sentinels(reports),
            Finding("store", "fail", f"{url}: {error}", "is it running, and is the URL right?"),
        ]
    finally:
        await connections.aclose()
    return [
        *judge_sentinels(reports),
        *judge_redis(server, memory, persistence),
        *judge_cluster(cluster, is_cluster_url=isinstance(finder, ClusterNodes)),
        *judge_replication(replication),
        *database,
        permissions,
        judge_clock(clock),
    ]


def judge_replication(replication: dict[str, object]) -> list[Finding]:
    """Return findings about the server's role and its replicas; none for a primary without replicas."""
    if replication.get("role") != "master":
        hint = "name the primary, or the Sentinels: redis+sentinel://HOST:26379/SERVICE"
        return [Finding("store replication", "fail", "this server is a replica, which refuses writes", hint)]
    replicas = [value for name, value in replication.items() if re.fullmatch(r"slave\d+", name)]
    if not replicas:
        return []
    behind = int(str(replication.get("master_repl_offset", 0)))
    late = [
        replica
        for replica in replicas
        if isinstance(replica, dict)
        and (replica.get("state") != "online" or behind - int(replica.get("offset", 0)) > MAX_LAG_BYTES)
    ]
    if not late and "min_slaves_good_slaves" not in replication:  # the field of a server that has a minimum
        hint = "CONFIG SET min-replicas-to-write 1: else a primary that is cut off goes on accepting requests"
        return [Finding("store replication", "warn", f"{len(replicas)} online, but none is required", hint)]
    if not late:
        return [Finding("store replication", "ok", f"{len(replicas)} online, at most 1 MB behind")]
    found = f"{len(late)} of {len(replicas)} replicas are offline or more than 1 MB behind"
    return [Finding("store replication", "warn", found, "a failover to one of them loses accepted requests")]


def judge_cluster(cluster: dict[str, object], *, is_cluster_url: bool) -> list[Finding]:
    """Return a finding if the server is a node of a cluster: whether the URL says so."""
    if not cluster.get("cluster_enabled"):
        return []
    if is_cluster_url:
        return [Finding("cluster", "ok", "its nodes report the primaries")]
    hint = "name some nodes: redis+cluster://HOST:6379,HOST:6379"
    return [Finding("cluster", "fail", "this server is a node of a cluster, and has only some models' keys", hint)]


async def check_database(client: Redis) -> list[Finding]:
    """Return a finding if the number of the database matters: it separates keys, but not channels.

    Raises:
        RedisError: If the store does not answer.
    """
    number = int(client.connection_pool.connection_kwargs.get("db") or 0)
    keyspace = await client.info("keyspace")
    others = [int(name.removeprefix("db")) for name in keyspace if name != f"db{number}"]
    async with client.client() as one:  # SELECT concerns one connection
        models = {each: await _models_in(one, each) for each in (number, *others)} if others else {}
    hint = "use --store-namespace to separate fleets: programs in other databases hear each other's channels"
    if shared := [f"{model} in database {each}" for each in others for model in sorted(models[each] & models[number])]:
        return [
            Finding(
                "store database",
                "fail",
                f"database {number} serves models that others serve too: {', '.join(shared)}",
                hint,
            )
        ]
    return [Finding("store database", "warn", f"database {number}", hint)] if number else []


async def _models_in(client: Redis, database: int) -> set[str]:
    """Return the models that were served from a database; none if the user may not read it."""
    try:
        await client.select(database)
        keys = client.scan_iter(match=RedisKeys("*").model, count=1_000)
        return {key.decode().partition("}")[0].lstrip("{") async for key in keys}
    except NoPermissionError:
        return set()


def judge_sentinels(reports: Sequence[PrimaryReport]) -> list[Finding]:
    """Return a finding unless the store has a fixed address: whether all Sentinels lead to one primary."""
    if not reports:
        return []
    primaries = sorted({report.primary for report in reports if report.primary})
    problems = [f"{report.sentinel}: {report.problem}" for report in reports if report.problem]
    if not primaries:
        return [Finding("sentinels", "fail", "; ".join(problems), "are these addresses of Sentinels of the service?")]
    if len(primaries) > 1:
        problems.append(f"they report {len(primaries)} primaries: {', '.join(primaries)}")
    slowest = max(report.down_after_seconds for report in reports)
    if not problems and slowest > MAX_DOWN_AFTER_SECONDS:
        hint = f"set down-after-milliseconds to at most {MAX_DOWN_AFTER_SECONDS * 1000:.0f}: else workers give up first"
        return [Finding("sentinels", "warn", f"they wait {slowest:g} s for a silent primary", hint)]
    if problems:
        hint = "a failover may not happen, or take longer; see SENTINEL MASTER and SENTINEL SENTINELS"
        return [Finding("sentinels", "warn", "; ".join(problems), hint)]
    return [Finding("sentinels", "ok", f"{len(reports)} report {primaries[0]}, with a quorum")]


def judge_redis(server: dict[str, object], memory: dict[str, object], persistence: dict[str, object]) -> list[Finding]:
    name = "valkey" if "valkey_version" in server else "redis"
    version = str(server.get("valkey_version") or server.get("redis_version"))
    new_enough = tuple(int(part) for part in version.split(".")[:2]) >= REDIS_MINIMUM
    policy = str(memory.get("maxmemory_policy"))
    durable = bool(persistence.get("aof_enabled"))
    return [
        Finding("store", "ok", f"{name} {version}")
        if new_enough
        else Finding("store", "fail", f"{name} {version}", "Redis 7.0 or Valkey 8 is needed"),
        Finding("store eviction", "ok", policy)
        if policy == "noeviction"
        else Finding("store eviction", "fail", policy, "CONFIG SET maxmemory-policy noeviction: else requests vanish"),
        Finding("store AOF", "ok", "on")
        if durable
        else Finding("store AOF", "warn", "off", "CONFIG SET appendonly yes: else a restart loses accepted requests"),
        _judge_memory(memory),
    ]


def _judge_memory(memory: dict[str, object]) -> Finding:
    limit, system = (int(str(memory.get(name) or 0)) for name in ("maxmemory", "total_system_memory"))
    if limit:
        return Finding("store memory", "ok", f"at most {limit / 2**30:.1f} GiB")
    found = f"no limit below the machine's {system / 2**30:.1f} GiB" if system else "no limit"
    hint = "CONFIG SET maxmemory 1gb: otherwise the system may kill it, and accepted requests are lost"
    return Finding("store memory", "warn", found, hint)


async def read_clock(
    store_time: Callable[[], Awaitable[tuple[int, int]]],
    wall: Callable[[], float] = time.time,
    stopwatch: Callable[[], float] = time.perf_counter,
) -> ClockReading:
    """Return the reading with the fastest reply. `store_time` returns seconds and microseconds since 1970 (TIME)."""
    readings = []
    for _ in range(NUM_CLOCK_READINGS):
        here, started = wall(), stopwatch()
        seconds, microseconds = await store_time()
        round_trip = stopwatch() - started
        there = seconds + microseconds / 1e6
        readings.append(ClockReading(there - (here + round_trip / 2), round_trip))
    return min(readings, key=lambda reading: reading.round_trip_seconds)


def judge_clock(reading: ClockReading) -> Finding:
    skew = reading.skew_seconds
    found = f"the store's is {_milliseconds(abs(skew))} {'ahead of' if skew > 0 else 'behind'} this machine's"
    found += f", it answers in {_milliseconds(reading.round_trip_seconds)}"
    if abs(skew) - reading.round_trip_seconds / 2 <= CLOCK_SKEW_SECONDS:
        return Finding("clock", "ok", found)
    hint = "run chrony or systemd-timesyncd on both: queue times in metrics and traces compare the two"
    return Finding("clock", "warn", found, hint)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
