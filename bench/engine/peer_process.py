"""A peer of `bench engine` in a separate process, run by the Python of its `make peers` environment.

It prints messages as JSON lines among the output of its libraries, and ends when standard input closes. Its log goes to
our standard error, so it is separate from the messages.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine.side import NoPeer


@dataclass(frozen=True, slots=True)
class PeerProcess:
    name: str  # of the peer and of the served file, for error messages
    served: Path
    process: subprocess.Popen[str]

    def ask(self, question: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)

    def message(self, field: str) -> dict[str, Any]:
        """Return the next message whose first field is `field`.

        Raises:
            NoPeer: If the process ends before.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(f'{{"{field}"'):
                message: dict[str, Any] = json.loads(line)
                return message
        raise NoPeer(f"{self.name} ended with status {self.process.wait()} before it served {self.served}")


@contextmanager
def peer_process(
    name: str,
    served: Path,
    environment: Path,
    program: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> Iterator[PeerProcess]:
    """Run `program` until the end of the context, with additional environment `variables`.

    Raises:
        NoPeer: If the peer's environment is not installed.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        raise NoPeer(f"{environment} does not exist; run `make peers` or `make {environment}/.installed`")
    # -P: files next to the program, such as profile.py, must not shadow the modules of its libraries.
    with subprocess.Popen(
        [str(python), "-P", str(program), *arguments],
        env={**os.environ, **(variables or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        try:
            yield PeerProcess(name, served, process)
        finally:
            with suppress(BrokenPipeError):  # the process has ended
                process.stdin.close()
