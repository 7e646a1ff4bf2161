"""The store's users (users.acl in deploy/kustomize): they allow the protocol and nothing else."""

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio import Redis

from bench.serving.free_port import free_port
from gateway.store.inference_client import InferenceClient
from gateway.store.kv_watch import snapshots_of
from shared.dead_letters import DeadLetters
from shared.messages import ErrorEvent, FinishEvent
from shared.new_requests import RetentionTerms, Share
from shared.reaping import reap_worker, reap_workers_with_prefix
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import SCRIPT_NAMES, Demand, RedisScripts, load_sources
from tests.builders import make_request
from tests.conftest import running_server
from tests.e2e.fleet import STOP_SECONDS, Fleet, running_fleet
from tests.e2e.reader import Reader
from tests.inbox_reader import InboxReader
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
USERS = ROOT / "deploy" / "kustomize" / "base" / "users.acl"
WORKER = str(ROOT / "tests" / "e2e" / "scripted_worker.py")


@dataclass
class Store:
    port: int

    def url(self, user: str) -> str:
        """Return the store's URL for `user`; `default` is a client that names no user."""
        return f"redis://{'' if user == 'default' else user + '@'}127.0.0.1:{self.port}/0"


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--protected-mode", "no", "--aclfile", str(USERS)]
    with running_server(request.config, options):
        yield Store(port)


@pytest.fixture
async def as_gateway(store: Store) -> AsyncIterator[RedisConnections]:
    opened = connect(store.url("gateway"))
    yield opened
    await opened.aclose()
    await asyncio.sleep(0)  # lets the transports of closed connections report their close to the loop


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path / "logs") as fleet:
        yield fleet


def start_worker(fleet: Fleet, store: Store, keys: RedisKeys, name: str, *flags: str) -> "subprocess.Popen[bytes]":
    argv = ["--model", "/none", "--served-model-name", keys.model_name, "--redis-url", store.url("worker")]
    return fleet.start(name, WORKER, *argv, "--metrics-port", "0", "--worker-id", name, *flags, PYTHONPATH=".")


async def test_store_users_allow_the_whole_protocol(
    store: Store, as_gateway: RedisConnections, keys: RedisKeys, fleet: Fleet
) -> None:
    """Covers tokens, a cancel, a takeover, retention, a dead letter, and KV snapshots."""
    client = InferenceClient(as_gateway, keys, "g0")
    await client.start()
    as_worker = connect(store.url("worker"))
    try:
        first = start_worker(fleet, store, keys, "w0", "--script-step-seconds", "0.02")
        reader = Reader(client, max_tokens=150)
        cancelled = make_request(max_tokens=1500, ignore_eos=True)
        await client.submission.submit(cancelled)
        async with snapshots_of([client.kv]) as snapshots:
            assert (await asyncio.wait_for(anext(snapshots), PATIENCE_SECONDS)).worker.startswith("w0.")
        await client.submission.cancel(cancelled)
        await reader.has(20)
        first.kill()
        first.wait()
        reaped = await reap_workers_with_prefix(as_worker.commands, keys, "w0")
        assert sum(summary.requeued for summary in reaped.values()) == 1
        second = start_worker(fleet, store, keys, "w1")
        await reader.check_complete()
        kept = make_request(max_tokens=3, ignore_eos=True)
        await client.submission.submit(kept, terms=RetentionTerms(b"record", "first", name="digest", fingerprint="f"))
        assert await client.archive.named("digest") == (kept.request_id, "f")
        (held,) = await client.submission.attach_all([kept], [RetentionTerms(b"record", "second", name="digest")])
        assert isinstance([event async for event in InboxReader(held)][-1], FinishEvent)
        (stored,) = await client.archive.stored([kept.request_id])
        assert stored is not None
        second.terminate()
        await asyncio.to_thread(second.wait, STOP_SECONDS)
        assert "NOPERM" not in fleet.all_logs() and "permission" not in fleet.all_logs()

        stream = await client.submission.submit(make_request())
        scripts = RedisScripts(as_worker.commands, keys)
        for life in ("w2.1", "w2.2", "w2.3"):  # each claims the request and dies
            await scripts.register(life)
            (entry,) = (await scripts.take(life, Demand(1))).entries
            await scripts.claim(life, [entry])
            await reap_worker(scripts, life)
        assert isinstance(await asyncio.wait_for(anext(InboxReader(stream)), PATIENCE_SECONDS), ErrorEvent)
        letters = DeadLetters(as_gateway.commands, keys)
        (letter,) = await letters.list()
        await letters.retry(letter)
        assert await letters.list() == []
        assert (await client.probe.queue_stats()).all.unfinished == 1
        assert await client.probe.write_seconds() < 10
        assert client.store_memory.has_room
    finally:
        await client.close()
        await as_worker.aclose()


OF_TURNS = (" +zadd +zrem +zcard +zcount +zrange +zscore", " +zscore", " +hlen", " %R~{*}:held:*")


async def test_store_users_of_old_release_read_in_arrival_order(
    request: pytest.FixtureRequest, tmp_path: Path, keys: RedisKeys
) -> None:
    """The users of an older release permit no commands for turns."""
    users = USERS.read_text()
    for words in OF_TURNS:
        assert words in users
        users = users.replace(words, "")
    (tmp_path / "users.acl").write_text(users)
    options = ["--port", str(port := free_port()), "--protected-mode", "no", "--aclfile", str(tmp_path / "users.acl")]
    with running_server(request.config, options):
        as_gateway, as_worker = (connect(Store(port).url(user)) for user in ("gateway", "worker"))
        client = InferenceClient(as_gateway, keys, "g0")
        scripts = RedisScripts(as_worker.commands, keys)
        await scripts.register("w.1")
        requests = [make_request() for _ in range(4)]
        for one, key in zip(requests, "aaab", strict=True):
            await client.submission.submit_all([one], share=Share(key))
        taken = [entry.request_id for _ in requests for entry in (await scripts.take("w.1", Demand(1))).entries]
        assert taken == [one.request_id for one in requests]
        await client.close()
        await as_worker.aclose()
        await as_gateway.aclose()


async def test_documented_passwords_are_needed_and_sufficient(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Runs the commands of the guide, whose `kubectl` only shows its arguments here."""
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    (commands,) = [block for block in guide.split("```")[1::2] if "hash()" in block]
    shell = "kubectl() { printf '%s\\n' \"$@\"; }\n" + commands.replace("deploy/kustomize/base/users.acl", str(USERS))
    run = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True, text=True)
    done = await asyncio.to_thread(run, ["bash", "-ec", shell])
    urls = dict(re.findall(r"--from-literal=(\w+)-url=(\S+)", done.stdout))
    options = ["--port", str(port := free_port()), "--protected-mode", "no", "--aclfile", str(tmp_path / "users.acl")]
    with running_server(request.config, options):
        for user in ("gateway", "worker"):
            url = urls[user].replace("pagestream-redis:6379", f"127.0.0.1:{port}")
            async with Redis.from_url(url) as client:
                assert await client.ping()
            async with Redis.from_url(Store(port).url(user)) as client:
                with pytest.raises(redis.exceptions.AuthenticationError):
                    await client.ping()


FORBIDDEN: dict[str, list[tuple[Any, ...]]] = {
    "default": [("GET", "{m}:r:1"), ("XRANGE", "{m}:q:interactive", "-", "+"), ("SET", "{m}:q:x", "1"),
                ("SUBSCRIBE", "{m}:gw:1"), ("EVALSHA", "0" * 40, 0)],
    "gateway": [("GET", "secret"), ("SET", "{m}:w:1", "1"), ("XACK", "{m}:q:interactive", "engine", "1-1"),
                ("XREADGROUP", "GROUP", "engine", "me", "STREAMS", "{m}:q:interactive", ">"),
                ("APPEND", "{m}:j:1", "x")],
    "worker": [("GET", "secret"), ("SET", "{m}:probe", "1"), ("SET", "{m}:kvw", "1"), ("INFO",),
               ("XREVRANGE", "{m}:q:batch", "+", "-")],
}  # fmt: skip
FORBIDDEN_TO_ALL: list[tuple[Any, ...]] = [
    ("EVAL", "return 1", 0), ("FUNCTION", "LIST"), ("SCRIPT", "FLUSH"), ("KEYS", "*"), ("SCAN", "0"),
    ("CONFIG", "GET", "*"), ("CONFIG", "SET", "maxmemory", "1"), ("FLUSHALL",), ("FLUSHDB",),
    ("SHUTDOWN",), ("SAVE",), ("MONITOR",), ("REPLICAOF", "NO", "ONE"), ("MODULE", "LIST"), ("ACL", "LIST"),
    ("CLIENT", "LIST"), ("MIGRATE", "h", "1", "k", "0", "1"),
    ("RESTORE", "{m}:r:1", "0", "x"), ("PUBLISH", "elsewhere", "x"), ("SUBSCRIBE", "elsewhere"), ("PSUBSCRIBE", "*"),
    ("SORT", "{m}:q:batch"), ("OBJECT", "ENCODING", "{m}:r:1"), ("DUMP", "{m}:r:1"), ("RENAME", "{m}:r:1", "{m}:r:2"),
]  # fmt: skip


@pytest.mark.parametrize("user", FORBIDDEN)
async def test_store_users_forbid_other_commands(store: Store, user: str) -> None:
    client = Redis.from_url(store.url(user))
    try:
        for command in [*FORBIDDEN_TO_ALL, *FORBIDDEN[user]]:
            with pytest.raises(redis.exceptions.NoPermissionError):
                await client.execute_command(*command)
    finally:
        await client.aclose()


async def test_store_users_limit_scripts_to_their_commands(store: Store) -> None:
    client = Redis.from_url(store.url("worker"))
    try:
        for body in ("return redis.call('KEYS', '*')", "return redis.call('GET', 'secret')"):
            with pytest.raises(redis.exceptions.ResponseError, match=r"permission|ACL failure|NOPERM"):
                await client.register_script(body)()
    finally:
        await client.aclose()


async def test_store_default_user_sees_queue_lengths(store: Store, as_gateway: RedisConnections) -> None:
    """A health check and an autoscaler need these."""
    await as_gateway.commands.xadd("{m}:q:batch", {"r": "1"})
    client = Redis.from_url(store.url("default"))
    try:
        assert await client.ping()
        assert await client.xlen("{m}:q:batch") == 1
    finally:
        await client.aclose()


def words_of(user: str, mark: str) -> set[str]:
    (line,) = [line for line in USERS.read_text().splitlines() if line.startswith(f"user {user} ")]
    words = [word.removeprefix("%R") for word in line.split()]
    return {word.removeprefix(mark) for word in words if word.startswith(mark)}


# Client methods whose name differs from their command.
COMMAND_OF = {
    "xpending_range": "xpending", "xinfo_groups": "xinfo|groups", "xinfo_consumers": "xinfo|consumers",
    "pubsub_numsub": "pubsub|numsub", "pubsub": "subscribe",
}  # fmt: skip
NO_COMMANDS = {"pipeline", "execute", "aclose", "register_script"}
CALL = re.compile(r"(?:redis|pipeline|commands|blocking|subscriber)\.([a-z_]+)\(")


@pytest.mark.parametrize(
    ("user", "files"),
    [
        ("gateway", ["gateway/*.py", "shared/subscription.py", "shared/dead_letters.py"]),
        ("worker", ["engine_worker/transport/*.py", "shared/subscription.py", "shared/reaping.py"]),
    ],
)
def test_store_user_may_run_commands_of_its_program(user: str, files: list[str]) -> None:
    """Every client method that a program calls must be a command that its user has."""
    text = "".join(path.read_text() for pattern in files for path in sorted(ROOT.glob(pattern)))
    called = {COMMAND_OF.get(name, name) for name in CALL.findall(text)} - NO_COMMANDS
    assert {"publish", "subscribe"} & called
    assert called <= words_of(user, "+")


def test_store_users_cover_every_kind_of_key() -> None:
    names = re.findall(r'_name\(f?"([^"]+)"\)', (ROOT / "shared" / "redis_keys.py").read_text())
    patterns = {re.sub(r"\{.*?\}", "*", name) for name in names}
    assert len(patterns) > 10
    users = [words_of(user, mark) for user in ("gateway", "worker") for mark in "~&"]
    mine = {word.removeprefix("{*}:") for words in users for word in words}
    assert {name + "*" if name.endswith(":") else name for name in patterns} <= mine


WORKER_SCRIPTS = {"register", "take", "level", "claim", "unclaim", "emit", "finish", "reap", "gone"}


def commands_of_scripts(names: set[str]) -> set[str]:
    text = "".join(source for name, source in load_sources().items() if name in names)
    found = re.findall(r"redis\.p?call\('([A-Z]+)'(?:, '([A-Z]+)')?", text)
    return {
        f"{command}|{second}".lower() if command in ("XGROUP", "XINFO", "PUBSUB") else command.lower()
        for command, second in found
    }


@pytest.mark.parametrize(
    ("user", "names"),
    [
        ("gateway", {"accept", "attach", "prolong", "limit", "cancel", "tick"}),
        ("worker", WORKER_SCRIPTS | {"cancel", "tick"}),
    ],
)
def test_store_user_may_run_commands_of_its_scripts(user: str, names: set[str]) -> None:
    assert commands_of_scripts(names) <= words_of(user, "+")


def test_every_script_is_assigned_to_a_user() -> None:
    """A new script must be listed above, and users.acl must allow its commands."""
    of_gateway = {"accept", "attach", "prolong", "limit"}
    assert set(SCRIPT_NAMES) == {*of_gateway, *WORKER_SCRIPTS, "cancel", "tick"}
