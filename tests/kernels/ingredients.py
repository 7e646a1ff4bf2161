"""The ingredients of a process's answer: the files of this repository that it has read, and versions of compilers.

An answer may be kept for as long as its ingredients are the same. Knows neither the answer nor where it is kept.
"""

import hashlib
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILERS = ("torch", "triton")


def sources_read() -> list[str]:
    """The repository's files that this process has imported so far, its program too; by path from the root."""
    files = {Path(file) for module in sys.modules.values() if (file := getattr(module, "__file__", None))}
    return sorted(str(file.relative_to(ROOT)) for file in files if _is_ours(file))


def ingredients(sources: list[str]) -> dict[str, str]:
    """The version of each compiler, and the hash of each of `sources`; those that are gone have an empty one."""
    versions = {name: version(name) for name in COMPILERS} | {"python": sys.version}
    return versions | {name: _hash(ROOT / name) for name in sources}


def are_the_same(then: dict[str, str]) -> bool:
    """Whether nothing of `then` has changed."""
    return ingredients([name for name in then if name.endswith(".py")]) == then


def _is_ours(file: Path) -> bool:
    return file.is_relative_to(ROOT) and "site-packages" not in file.parts


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""
