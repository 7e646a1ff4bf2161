"""GGUF files become model directories once, in the cache, through the converter's own process.

It is used at the start of `serve`, before the workers. It knows the converter's command line and its progress lines,
and nothing of GGUF.
"""

import asyncio
import hashlib
import re
import sys
from pathlib import Path

from pagestream.child_process import ChildCommand, ChildProcess
from pagestream.directories import cache_directory
from pagestream.file_lock import file_lock
from pagestream.phases import PhaseReport

CONVERTER_VERSION = 3  # raise it when the converter writes something else from the same file
_FINGERPRINT_BYTES = 2**20
_PROGRESS_LINE = re.compile(r"convert +(\d+)% +[\d.]+ s +(.*)")


class ModelUnavailable(RuntimeError):
    """The model cannot be had; the message says why and what would help."""


def converted_directory(gguf: Path) -> Path:
    """The directory that `gguf` is converted to: another one as soon as the file's size, head or tail differ."""
    with gguf.open("rb") as file:
        head = file.read(_FINGERPRINT_BYTES)
        size = file.seek(0, 2)
        file.seek(max(0, size - _FINGERPRINT_BYTES))
        tail = file.read()
    digest = hashlib.blake2b(b"%d %d " % (CONVERTER_VERSION, size) + head + tail, digest_size=6).hexdigest()
    return cache_directory() / "models" / f"{gguf.stem}-{digest}"


async def convert_once(gguf: Path, target: Path, report: PhaseReport) -> None:
    """Make `target` from `gguf` unless it is there. One process converts, any other one waits for it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    async with file_lock(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return
        report("convert", 0.0, gguf.name)
        await _convert(gguf, target, report)
        report("convert", 1.0, str(target))


async def _convert(gguf: Path, target: Path, report: PhaseReport) -> None:
    def read_progress(_name: str, line: str) -> None:
        if match := _PROGRESS_LINE.match(line):
            report("convert", int(match[1]) / 100, match[2])

    argv = [sys.executable, "-P", "-m", "engine_worker.convert_gguf", str(gguf), str(target)]
    converter = await ChildProcess.start(ChildCommand(name="convert", argv=argv), read_progress)
    try:
        status = await converter.wait()
    except asyncio.CancelledError:
        await converter.stop(grace_seconds=5.0)  # it removes what it had begun
        raise
    if status != 0:
        raise ModelUnavailable(f"{gguf} could not be converted:\n" + "\n".join(converter.last_lines))
