"""Directories for cached and persistent files, from the XDG base directory specification."""

import contextlib
import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory for files that can be created again, such as converted weights."""
    return _base("XDG_CACHE_HOME", ".cache") / "pagestream"


def state_directory() -> Path:
    """Return the directory for files that must survive a restart, such as the store's append-only file."""
    return _base("XDG_STATE_HOME", ".local/state") / "pagestream"


def point(link: Path, target: Path) -> None:
    """Point `link` at `target` atomically."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(target)
    new.replace(link)


def _base(variable: str, under_home: str) -> Path:
    value = os.environ.get(variable, "")
    # The specification requires ignoring relative paths in these variables.
    return Path(value) if os.path.isabs(value) else Path.home() / under_home
