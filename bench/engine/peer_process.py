"""A peer of `bench engine` in a process of its own, by the Python of its environment of `make peers`.

It prints messages, lines of JSON, among what else its libraries print, and ends when its standard input does. Its log
goes to our standard error: it is told apart from what is measured, and seen if it fails. It knows no peer by its name.
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
    name: str  # of the peer and of what it serves, for who is told of its end
    served: Path
    process: subprocess.Popen[str]

    def ask(self, question: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)

    def told(self, field: str) -> dict[str, Any]:
        """The next message whose first field that is. Raises NoPeer where the process ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(f'{{"{field}"'):
                message: dict[str, Any] = json.loads(line)
                return message
        raise NoPeer(f"{self.name} ended with {self.process.wait()} before it served {self.served}")


@contextmanager
def peer_process(
    name: str,
    served: Path,
    environment: Path,
    program: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> Iterator[PeerProcess]:
    """`program` until the end of the block, with `variables` beside those of this process. Raises NoPeer."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise NoPeer(f"{environment} is not there: make peers, or make {environment}/.installed alone")
    # -P: what lies beside the program, a profile.py for one, is not what its libraries import by that name.
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
            with suppress(BrokenPipeError):  # it has ended
                process.stdin.close()
