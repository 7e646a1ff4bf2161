"""Answers of a slow process, kept on this machine with the ingredients of each.

They are stored outside the clone, so that another clone of the same sources finds them.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kernels.ingredients import are_the_same


class KeptAnswers:
    """A directory of the last `most` answers, one file each."""

    def __init__(self, directory: Path, most: int = 8) -> None:
        self._directory = directory
        self._most = most

    def find(self) -> list[dict[str, Any]] | None:
        """Return the answer whose ingredients match this clone, or None."""
        for file in self._files():
            with suppress(FileNotFoundError):  # removed by a concurrent suite
                answer, ingredients = json.loads(file.read_text())
                if are_the_same(ingredients):
                    return list(answer)
        return None

    def keep(self, answer: list[dict[str, Any]], ingredients: dict[str, str]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
        whole = self._directory / f"{name}.{os.getpid()}.part"
        whole.write_text(json.dumps([answer, ingredients]))
        whole.replace(self._directory / f"{name}.json")  # atomic: a concurrent suite may read
        for file in self._files()[self._most :]:
            file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """Return the files, newest first."""
        kept_at: dict[Path, int] = {}
        for file in self._directory.glob("*.json"):
            with suppress(FileNotFoundError):
                kept_at[file] = file.stat().st_mtime_ns
        return sorted(kept_at, key=lambda file: kept_at[file], reverse=True)
