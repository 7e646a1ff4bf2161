"""Models named ORG/NAME, as on the Hugging Face hub: download one through `pagestream.hub_download`."""

import asyncio
import os
import re
import sys
from pathlib import Path

from pagestream.child_process import ChildCommand, ChildProcess
from pagestream.directories import cache_directory
from pagestream.gguf_model import ModelUnavailable
from pagestream.phases import PhaseReport

DEFAULT_REVISION = "main"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PROGRESS_LINE = re.compile(r"download +(\d+)% +(.*)")
_ERROR = "download: "


def is_hub_name(model: str) -> bool:
    return _NAME.fullmatch(model) is not None


def hub_directory(repository: str, revision: str) -> Path:
    """Return the link to the snapshot in the hub's cache; it exists once the model is complete."""
    readable = re.sub(r"[^\w.-]", "--", f"{repository}@{revision}".replace("@", "--"))
    return cache_directory() / "models" / f"hub--{readable}"


async def prepare_hub_model(repository: str, revision: str, report: PhaseReport) -> None:
    """Download a model; raise ModelUnavailable with the downloader's message."""

    def read_progress(_name: str, line: str) -> None:
        if match := _PROGRESS_LINE.match(line):
            report("download", int(match[1]) / 100, match[2])

    report("download", 0.0, f"{repository} ({revision})")
    link = hub_directory(repository, revision)
    argv = [sys.executable, "-P", "-m", "pagestream.hub_download", repository, revision, str(link)]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    child = await ChildProcess.start(ChildCommand(name="download", argv=argv, environ=environ), read_progress)
    try:
        status = await child.wait()
    except asyncio.CancelledError:
        child.kill()  # the next start resumes from the cache
        await child.wait()
        raise
    if status != 0:
        errors = [line.removeprefix(_ERROR) for line in child.last_lines if line.startswith(_ERROR)]
        raise ModelUnavailable("\n".join(errors or child.last_lines) or f"the download of {repository} failed")
    report("download", 1.0, str(link))
