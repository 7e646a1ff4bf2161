"""Shared parts of the heavy clients: the server's address, running a client in its environment, its report.

A client gets a clean environment and a home directory of its own. Only the server is reachable.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

RUN_SECONDS = 900.0  # the longest took 150 s on two cores shared with eight other programs
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\n]*\r(?!\n)")  # colors, and text that a progress bar overwrote


class PeerFailed(AssertionError):
    """The client exited with an error, or did not see what it should."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server under test; `model` is the directory of the weights served as `name`."""

    url: str  # ends before /v1
    name: str
    model: Path


@dataclass(frozen=True, slots=True)
class Report:
    """`summary` is one line; `output` is what the client printed about its result."""

    summary: str
    output: str


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment `.venv/peers/NAME`, and an empty folder for the client's output."""

    name: str
    folder: Path

    @property
    def directory(self) -> Path:
        return Path(sys.prefix) / "peers" / self.name

    def version(self, package: str) -> str:
        (site,) = self.directory.glob("lib/python3*/site-packages")
        return next(iter(distributions(name=package, path=[str(site)]))).version

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.folder), "OPENAI_API_KEY": "unused", "COLUMNS": "120", **more}

    def run(self, program: str, *arguments: str, variables: Mapping[str, str] = OFFLINE) -> str:
        """Return the client's output without colors.

        Raises:
            PeerFailed: If its exit status is not 0.
        """
        done = subprocess.run(
            [str(self.directory / "bin" / program), *arguments],
            env=self.variables(variables),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=RUN_SECONDS,
        )
        output = _CONTROL.sub("", done.stdout.decode(errors="replace"))
        (self.folder / "output.txt").write_text(output)
        if done.returncode != 0:
            raise PeerFailed(f"{program} ended with {done.returncode}:\n{output[-3000:]}")
        return output


def expect(what: str, seen: object, expected: object) -> None:
    if seen != expected:
        raise PeerFailed(f"{what}: {seen!r}, not {expected!r}")


def lines_from(output: str, start: str, end: str = "") -> str:
    """Return the lines from the one that contains `start` to the one before `end`.

    Raises:
        PeerFailed: If no line contains `start`.
    """
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if start in line), None)
    if first is None:
        raise PeerFailed(f"no line with {start!r} in:\n{output[-3000:]}")
    last = next((number for number, line in enumerate(lines[first:], first) if end and end in line), len(lines))
    return "\n".join(line.rstrip() for line in lines[first:last]).strip() + "\n"


def figure(output: str, label: str) -> str:
    """Return the number after `label:` in a client's table."""
    found = re.search(rf"^{re.escape(label)}:\s+(\S+)\s*$", output, re.MULTILINE)
    if found is None:
        raise PeerFailed(f"no {label!r} in:\n{output[-3000:]}")
    return found[1]
