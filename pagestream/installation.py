"""What is installed: the extras that a command needs, and packages of others with the same names as ours.

It reads the metadata of installed distributions and searches for modules without importing them.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "pagestream"
# Top-level packages of the wheel. The names are common words, so other distributions may contain them too.
PACKAGES = ("engine_worker", "gateway", "kernels", "pagestream", "shared")
HOME = Path(__file__).parents[1]  # site-packages, or the root of a clone
_OF_EXTRA = re.compile(r"([\w.-]+)[^;]*; extra == \"(\w+)\"")  # ignores requirements of single platforms (triton)


@dataclass(frozen=True)
class ForeignPackage:
    """A package of another distribution with one of our names, and a fix."""

    message: str
    hint: str


def missing(*extras: str) -> list[str]:
    """Return the missing distributions of these extras; none if pagestream itself is not installed."""
    needed = [match.groups() for match in map(_OF_EXTRA.fullmatch, _requirements()) if match]
    return sorted({name for name, extra in needed if extra in extras and not _is_installed(name)})


def missing_message(extra: str, *parts: str) -> str:
    """Return the message that names what to install, or "".

    Args:
        extra: The extra to name in the message.
        *parts: The extras that it combines, if several.
    """
    absent = missing(*(parts or (extra,)))
    return f"{', '.join(absent)} not installed: pip install '{DISTRIBUTION}[{extra}]'" if absent else ""


def foreign_packages(owners: Mapping[str, Sequence[str]] | None = None) -> list[ForeignPackage]:
    """Return packages of other distributions with our names.

    Args:
        owners: Distributions of each top-level package; default: those of this environment.
    """
    owners = metadata.packages_distributions() if owners is None else owners
    foreign = []
    for name in PACKAGES:
        others = sorted({owner for owner in owners.get(name, []) if owner != DISTRIBUTION})
        if others:
            message = f"{', '.join(others)} also installs a package `{name}`, which replaces ours or mixes with it"
            hint = f"pip uninstall {' '.join(others)}; pip install --force-reinstall --no-deps {DISTRIBUTION}"
            foreign.append(ForeignPackage(message, hint))
        elif (found := _location(name)) != HOME / name:
            message = f"the package `{name}` is {found or 'missing'}, expected {HOME / name}"
            foreign.append(ForeignPackage(message, f"remove it, or install {DISTRIBUTION} in its own environment"))
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
