"""Which commit a result was made with. Knows nothing of what is measured."""

import subprocess
from pathlib import Path


def commit() -> str:
    """Twelve digits of this repository's commit, and `-dirty` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # installed or copied without its repository
    return answer.stdout.strip()
