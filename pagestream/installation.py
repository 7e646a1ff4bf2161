"""The parts of pagestream in this environment: the extras that a command needs, no other package under its names.

Asks the metadata of installed distributions and Python's own search for modules; imports none of what it looks for.

`doctor` and commands that need an extra ask it before any walk. It knows no command but by its extra.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "pagestream"
# The top-level packages of the wheel. The names are common words, so another distribution can bring one of them too.
PACKAGES = ("engine_worker", "gateway", "kernels", "pagestream", "shared")
HOME = Path(__file__).parents[1]  # site-packages, or the root of a clone
_OF_EXTRA = re.compile(
    r"([\w.-]+)[^;]*; extra == \"(\w+)\""
)  # what a platform adds to an extra (triton) is passed over


@dataclass(frozen=True)
class ForeignPackage:
    """Somebody else's package under one of our names: what it is, and what would help."""

    message: str
    hint: str


def missing(*extras: str) -> list[str]:
    """The distributions that these extras name and this environment lacks; none where only the source is there."""
    needed = [match.groups() for match in map(_OF_EXTRA.fullmatch, _requirements()) if match]
    return sorted({name for name, extra in needed if extra in extras and not _is_installed(name)})


def missing_told(extra: str, *parts: str) -> str:
    """Say what to install, or nothing: `extra` is to be named, `parts` are the extras it stands for, if several."""
    absent = missing(*(parts or (extra,)))
    return f"{', '.join(absent)} not installed: pip install '{DISTRIBUTION}[{extra}]'" if absent else ""


def foreign_packages(owners: Mapping[str, Sequence[str]] | None = None) -> list[ForeignPackage]:
    """`owners`: the distributions that hold files of each top-level package; default: as this environment has them."""
    owners = metadata.packages_distributions() if owners is None else owners
    foreign = []
    for name in PACKAGES:
        others = sorted({owner for owner in owners.get(name, []) if owner != DISTRIBUTION})
        if others:
            told = f"{', '.join(others)} installs a package `{name}` too, which stands in for ours or mixes with it"
            hint = f"pip uninstall {' '.join(others)}; pip install --force-reinstall --no-deps {DISTRIBUTION}"
            foreign.append(ForeignPackage(told, hint))
        elif (found := _location(name)) != HOME / name:
            told = f"the package `{name}` is {found or 'nowhere'}, not {HOME / name}"
            foreign.append(ForeignPackage(told, f"take it away, or give {DISTRIBUTION} an environment of its own"))
    return foreign


def _location(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _requirements() -> list[str]:
    return (metadata.requires(DISTRIBUTION) or []) if _is_installed(DISTRIBUTION) else []


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
