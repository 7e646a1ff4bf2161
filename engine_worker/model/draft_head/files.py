"""Where a draft head is, as settings say it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DraftHeadFiles:
    """The files of a head.

    Attributes:
        method: `eagle3` or `mtp`.
        directory: That of the head; of `mtp`, that of the model.
    """

    method: str
    directory: Path
