"""How a result came about: the command, the commit, the machine. Knows nothing of what is measured."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance(argv: list[str]) -> dict[str, Any]:
    """Return what is needed to run it again."""
    return {
        "command": " ".join(["python -m bench", *argv]),
        "commit": commit(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
        "machine": platform.platform(),
    }


def commit() -> str:
    """Twelve digits of this repository's commit, and `-dirty` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # installed or copied without its repository
    return answer.stdout.strip()
