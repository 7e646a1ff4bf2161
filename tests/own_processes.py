"""The processes that a test has started, told from those of another test, of another run or of whoever else is here."""

import contextlib

import psutil


def running(program: str) -> list[list[str]]:
    """The command lines of the children of this process, and of theirs, of which `program` is a word."""
    commands = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile, or nobody has asked how yet
            commands.append(child.cmdline())
    return [command for command in commands if program in command]
