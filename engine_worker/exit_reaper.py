"""`python -m engine_worker.exit_reaper`: waits for the exit of the worker that started it, then requeues its requests.

Its stdin is a pipe whose write end only the worker has. The kernel closes it when the worker's last thread has exited,
so an EOF proves that the worker sends nothing more; no missed heartbeats need be counted. The pipe carries the store's
URL, the model, the namespace, and the id of each incarnation; without an id the worker never served. Each worker of
several ranks starts one, because a group may run without a supervisor.
"""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from redis.exceptions import RedisError

from shared.reaping import reap_worker
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts

PATIENCE_SECONDS = 5.0  # for the store; then peers reap the worker after missed heartbeats
_ROOT = Path(__file__).parents[1]


class ExitReaper:
    """The worker's side: the process that requeues this worker's requests after its exit."""

    def __init__(self, redis_url: str, keys: RedisKeys) -> None:
        """Start the process, in its own session so that Ctrl-C does not end it. Raises OSError on failure."""
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine_worker.exit_reaper"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self._write(redis_url)  # through the pipe, because other users can read arguments
        self._write(keys.model_name)
        self._write(keys.namespace)

    def watch(self, worker_id: str) -> None:
        """Set the current incarnation, whose requests are requeued; earlier ones have ended."""
        self._write(worker_id)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process was killed; peers then reap this worker by missed heartbeats
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())


def main() -> int:
    """Wait for EOF, requeue, and return the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    redis_url, model_name, namespace, *worker_ids = sys.stdin.read().splitlines()
    return asyncio.run(_requeue(redis_url, RedisKeys(model_name, namespace), worker_ids[-1])) if worker_ids else 0


async def _requeue(redis_url: str, keys: RedisKeys, worker_id: str) -> int:
    connections = connect(redis_url, hash_tag=keys.hash_tag)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reap_worker(RedisScripts(connections.commands, keys), worker_id)
    except (RedisError, OSError, TimeoutError) as error:
        sys.stderr.write(f"worker {worker_id}: requeue failed; peers will requeue after missed heartbeats: {error}\n")
        return 1
    finally:
        await connections.aclose()
    return 0


if __name__ == "__main__":
    sys.exit(main())
