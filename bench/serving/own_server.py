"""A benchmark's own `pagestream serve`, on a free port and with its own store.

with own_server(model, "m", ["--dtype", "float32"]) as server:
    server.url, server.pid
"""

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.serving.free_port import free_port

START_SECONDS = 120.0


class ServerEnded(RuntimeError):
    """`pagestream serve` was not ready in time, or a request to it failed."""


@dataclass(frozen=True)
class OwnServer:
    url: str  # base URL, without /v1
    pid: int  # of the supervisor


@contextmanager
def own_server(model: Path, served_name: str, flags: Sequence[str]) -> Iterator[OwnServer]:
    port = free_port()
    options = ["--port", str(port), "--served-model-name", served_name, *flags]
    command = [sys.executable, "-m", "pagestream", "serve", str(model), "--metrics-port", "0", *options]
    # A short prefix, because a socket path is limited to 107 bytes and the store's socket is in that directory.
    with tempfile.TemporaryDirectory(prefix="ps-") as state, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, "XDG_STATE_HOME": state}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            if not _becomes_ready(process, port):
                log.seek(0)
                raise ServerEnded("pagestream serve is not ready:\n" + log.read().decode(errors="replace")[-2000:])
            yield OwnServer(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _becomes_ready(process: "subprocess.Popen[bytes]", port: int) -> bool:
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as reply:
                if reply.status == 200:
                    return True
        except OSError:
            time.sleep(0.1)
    return False
