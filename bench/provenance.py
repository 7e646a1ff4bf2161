"""How a result was made: command, commit and machine."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance(argv: list[str]) -> dict[str, Any]:
    """Return what is needed to repeat a run."""
    return {
        "command": " ".join(["python -m bench", *argv]),
        "commit": commit(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
        "machine": platform.platform(),
    }


def commit() -> str:
    """Return twelve digits of this repository's commit, with `-dirty` if files differ."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # installed or copied without its repository
    return answer.stdout.strip()
