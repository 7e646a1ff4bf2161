"""Models of the Hugging Face hub: ORG/NAME, or ORG/NAME:TAG for the GGUF file of a repository that ends with TAG.

`pagestream.hub_download` downloads them.
"""

import asyncio
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from pagestream.child_process import ChildCommand, ChildProcess
from pagestream.directories import cache_directory, point
from pagestream.gguf_model import ModelUnavailable, convert_once, converted_directory
from pagestream.phases import PhaseReport

DEFAULT_REVISION = "main"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([A-Za-z0-9][\w.-]*))?")
_PROGRESS_LINE = re.compile(r"download +(\d+)% +(.*)")
_ERROR = "download: "


@dataclass(frozen=True)
class HubModel:
    """A model on the hub; `tag` ends the name of its GGUF file, or is empty for a model directory."""

    repository: str
    tag: str
    revision: str

    @property
    def directory(self) -> Path:
        """Return the link to the model directory; it exists once the model is complete."""
        readable = re.sub(r"[^\w.-]", "--", "--".join(filter(None, (self.repository, self.revision, self.tag))))
        return cache_directory() / "models" / f"hub--{readable}"

    async def prepare(self, report: PhaseReport) -> None:
        """Download the model, and convert a GGUF file; raise ModelUnavailable with the reason."""
        if not self.tag:
            await self._download(self.directory, report)
            return
        file = self.directory.with_name(self.directory.name + ".gguf")
        await self._download(file, report)
        target = converted_directory(file)
        await convert_once(file, target, report)
        point(self.directory, target)

    async def _download(self, link: Path, report: PhaseReport) -> None:
        def read_progress(_name: str, line: str) -> None:
            if match := _PROGRESS_LINE.match(line):
                report("download", int(match[1]) / 100, match[2])

        report("download", 0.0, f"{self.repository} ({self.revision})")
        argv = [sys.executable, "-P", "-m", "pagestream.hub_download", self.repository, self.revision, str(link)]
        argv += [self.tag] if self.tag else []
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
            raise ModelUnavailable("\n".join(errors or child.last_lines) or f"no download of {self.repository}")
        report("download", 1.0, str(link))


def hub_model(name: str, revision: str = DEFAULT_REVISION) -> HubModel | None:
    """Return the model of a name, or None if it is no name of the hub."""
    match = _NAME.fullmatch(name)
    return None if match is None else HubModel(match[1], match[2] or "", revision)
