"""GGUF files: converted once to model directories in the cache, by a process of `engine_worker.convert_gguf`."""

import asyncio
import hashlib
import re
import sys
from pathlib import Path

from pagestream.child_process import ChildCommand, ChildProcess
from pagestream.directories import cache_directory
from pagestream.file_lock import file_lock
from pagestream.phases import PhaseReport

CONVERTER_VERSION = 4  # increase it when the converter's output for a file changes
_FINGERPRINT_BYTES = 2**20
_PROGRESS_LINE = re.compile(r"convert +(\d+)% +[\d.]+ s +(.*)")


class ModelUnavailable(RuntimeError):
    """The model is not available; the message gives the reason and a fix."""


def converted_directory(gguf: Path) -> Path:
    """Return the directory for the converted file; it depends on the file's size, head, and tail."""
    with gguf.open("rb") as file:
        head = file.read(_FINGERPRINT_BYTES)
        size = file.seek(0, 2)
        file.seek(max(0, size - _FINGERPRINT_BYTES))
        tail = file.read()
    digest = hashlib.blake2b(b"%d %d " % (CONVERTER_VERSION, size) + head + tail, digest_size=6).hexdigest()
    return cache_directory() / "models" / f"{gguf.stem}-{digest}"


async def convert_once(gguf: Path, target: Path, report: PhaseReport) -> None:
    """Convert `gguf` to `target` unless it exists; concurrent callers wait for the one that converts."""
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
        await converter.stop(grace_seconds=5.0)  # it removes its partial output
        raise
    if status != 0:
        raise ModelUnavailable(f"converting {gguf} failed:\n" + "\n".join(converter.last_lines))
