"""The processes that a test has started, apart from those of other tests, runs or users."""

import contextlib

import psutil


def running(program: str) -> list[list[str]]:
    """Return the command lines of this process's descendants that contain the word `program`."""
    commands = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
            commands.append(child.cmdline())
    return [command for command in commands if program in command]
