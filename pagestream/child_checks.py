"""Check the settings of children before anything is started."""

import asyncio
import re
from collections.abc import Sequence

from pagestream.child_process import ChildCommand
from pagestream.serve_settings import GATEWAY_FLAGS, ServeSettings
from shared.settings import options, suggestion

CHECK_SECONDS = 30.0
_UNKNOWN = re.compile(r"unknown option (--[\w-]+).*; see --help")


class ChildRefused(ValueError):
    """A child refuses its settings; the message is its own."""


async def check_children(commands: Sequence[ChildCommand]) -> None:
    """Run each command with --check, at the same time.

    Raises:
        ChildRefused: If one of them refuses its settings.
    """
    for problem in await asyncio.gather(*map(_problem_of, commands)):
        if problem:
            raise ChildRefused(problem)


async def _problem_of(command: ChildCommand) -> str:
    process = await asyncio.create_subprocess_exec(
        *command.argv,
        "--check",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=command.environ,
    )
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            _, output = await process.communicate()
    except TimeoutError:  # the machine is busy; the child will say the same when it starts
        process.kill()
        await process.wait()
        return ""
    return _with_suggestion(output.decode(errors="replace").strip()) if process.returncode else ""


def _with_suggestion(problem: str) -> str:
    """Add an option of `serve` or of the gateway that a worker does not know."""
    if not (found := _UNKNOWN.search(problem)):
        return problem
    own = ["--" + field.name.replace("_", "-") for field in options(ServeSettings)]
    hint = suggestion(found[1], [*own, *GATEWAY_FLAGS])
    return problem.replace("see --help", hint) if hint else problem
