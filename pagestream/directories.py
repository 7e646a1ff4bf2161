"""Directories of the embedded default: the XDG base directories, nothing beside them.

It is used at the start of every command. It knows no file in them.
"""

import os
from pathlib import Path


def cache_directory() -> Path:
    """The directory of files that can be made again: converted weights."""
    return _base("XDG_CACHE_HOME", ".cache") / "pagestream"


def state_directory() -> Path:
    """The directory of files that must outlive a restart: the store's append-only file."""
    return _base("XDG_STATE_HOME", ".local/state") / "pagestream"


def _base(variable: str, under_home: str) -> Path:
    value = os.environ.get(variable, "")
    # The specification: a relative path in these variables is invalid and is to be ignored.
    return Path(value) if os.path.isabs(value) else Path.home() / under_home
