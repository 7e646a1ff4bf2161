"""Find earlier processes of `serve` that were killed, and whose workers the store still counts as alive.

Each `serve` locks one file per store and model, named after its fleet. The kernel releases the lock with the process,
so an unlocked file belongs to a killed `serve`. Its workers have ended too (exit_with_parent).
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FleetFiles:
    """The lock files of all fleets that serve one model on one store."""

    directory: Path
    store_url: str
    model_name: str

    @contextmanager
    def hold(self, fleet_id: str) -> Iterator[None]:
        """Mark this fleet as alive. The file remains, because a stop may kill workers that the next fleet must reap."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.directory / f"{self._prefix}{fleet_id}"
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def dead(self) -> list[str]:
        """Return the ids of fleets that were killed."""
        paths = self.directory.glob(f"{self._prefix}*")
        return [path.name.removeprefix(self._prefix) for path in paths if _is_unlocked(path)]

    def forget(self, fleet_id: str) -> None:
        """Remove the file of a dead fleet. Reap its workers first."""
        (self.directory / f"{self._prefix}{fleet_id}").unlink(missing_ok=True)

    @property
    def _prefix(self) -> str:
        names = f"{self.store_url}\n{self.model_name}"  # hashed, because the URL may hold a password
        digest = hashlib.blake2b(os.fsencode(names), digest_size=6)
        return f"{digest.hexdigest()}-"


def _is_unlocked(path: Path) -> bool:
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True
