"""`python -m engine_worker.exit_reaper`: waits for the end of the worker that started it, then requeues what that held.

Its input is a pipe whose other end the worker alone has. The kernel closes that when the last thread of the worker is
gone, however it ended, so whoever reads the end knows that nothing more will be sent: no missed heartbeats need be
counted, and no other reader could mistake a slow worker for a dead one. It says the store's URL, the model and, with
each life, the worker's id; an input without an id was of a worker that never served.

A worker of several ranks has one: a supervisor requeues for its workers as soon, but not every group has one. It knows
no request and no rank. It is started with a worker, and its word is the first step of a takeover.
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

PATIENCE_SECONDS = 5.0  # with the store; then others find the worker dead by its missing heartbeats
_ROOT = Path(__file__).parents[1]


class ExitReaper:
    """The worker's side: who is to be requeued once this process has ended."""

    def __init__(self, redis_url: str, model_name: str) -> None:
        """Raises OSError where no process can be started. It hears no signal of this one's terminal."""
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine_worker.exit_reaper"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self._tell(redis_url)  # by the pipe, as arguments are for all to read
        self._tell(model_name)

    def name(self, worker_id: str) -> None:
        """The one of `worker_id` is requeued, and none named before: that life is over."""
        self._tell(worker_id)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed: others find this worker by its heartbeats then
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    redis_url, model_name, *worker_ids = sys.stdin.read().splitlines()
    return asyncio.run(_requeue(redis_url, model_name, worker_ids[-1])) if worker_ids else 0


async def _requeue(redis_url: str, model_name: str, worker_id: str) -> int:
    connections = connect(redis_url)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reap_worker(RedisScripts(connections.commands, RedisKeys(model_name)), worker_id)
    except (RedisError, OSError, TimeoutError) as error:
        sys.stderr.write(f"what {worker_id} held is requeued when its heartbeats are missed: {error}\n")
        return 1
    finally:
        await connections.aclose()
    return 0


if __name__ == "__main__":
    sys.exit(main())
