"""The ingredients of a process's answer: the repository files that it has read, and compiler versions.

A kept answer is valid while its ingredients are unchanged.
"""

import hashlib
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILERS = ("torch", "triton")


def sources_read() -> list[str]:
    """Return the repository files that this process has imported, with its program, as paths from the root."""
    files = {Path(file) for module in sys.modules.values() if (file := getattr(module, "__file__", None))}
    return sorted(str(file.relative_to(ROOT)) for file in files if _is_ours(file))


def ingredients(sources: list[str]) -> dict[str, str]:
    """Return the version of each compiler and the hash of each file of `sources`; "" for a missing file."""
    versions = {name: version(name) for name in COMPILERS} | {"python": sys.version}
    return versions | {name: _hash(ROOT / name) for name in sources}


def are_the_same(then: dict[str, str]) -> bool:
    """Return whether nothing in `then` has changed."""
    return ingredients([name for name in then if name.endswith(".py")]) == then


def _is_ours(file: Path) -> bool:
    return file.is_relative_to(ROOT) and "site-packages" not in file.parts


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""
