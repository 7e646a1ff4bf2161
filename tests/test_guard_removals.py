"""The table of guards is complete and matches the source; `make mutants` checks that each removal is caught."""

from pathlib import Path
from typing import Any

import pytest

from tests.guard_removals import ROOT, Removal, documented_classes, named_tests, removals, survivors

REMOVALS = removals()


def test_documented_classes_have_guards_and_tests() -> None:
    """A new class needs a row in docs/internals/security-model.md and guards in guard_removals.toml."""
    documented = documented_classes()
    assert sorted(documented) == sorted(named_tests())
    assert all(removal.caught_by for removal in REMOVALS)


@pytest.mark.parametrize("removal", REMOVALS, ids=str)
def test_each_guard_exists_in_the_source(removal: Removal) -> None:
    """If a guard was moved or rewritten, update guard_removals.toml and run `make mutants ARGS=FILE`."""
    assert removal.environ or removal.remove_from((ROOT / removal.file).read_text())


TREE = {
    "guard.py": "IS_CHECKED = True\n",
    "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
    "tests/test_it.py": "import guard\n\ndef test_fails():\n    assert guard.IS_CHECKED\n\ndef test_passes(): ...\n",
}


def test_what_does_not_fail_survives(tmp_path: Path) -> None:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    both = frozenset(("test_it.py::test_fails", "test_it.py::test_passes"))
    removal = Removal(row="", file="guard.py", replace=("True", "False"), caught_by=both)
    assert survivors(removal, tmp_path) == {"test_it.py::test_passes"}
    unreadable = Removal(row="", file="guard.py", replace=("True", "("), caught_by=both)
    assert survivors(unreadable, tmp_path) == both  # it fails before it begins
    assert (tmp_path / "guard.py").read_text() == TREE["guard.py"]


SOURCE = """
class Door:
    @property
    def width(self): return "é"  # a byte more than a character

    def open(self, key):
        if key != self.key:
            raise Refused("no")
        self.check(key)
        return True

def open(key):
    self.check(key)
"""


@pytest.mark.parametrize(
    ("changes", "old", "new"),
    [
        ({"drop": "raise Refused"}, 'raise Refused("no")', "pass"),
        ({"drop": "self.check("}, "self.check(key)\n        return", "pass\n        return"),
        ({"replace": ("key != self.key", "False")}, "key != self.key", "False"),
        ({"function": "Door", "replace": ('"é"', '""')}, '"é"', '""'),
        ({"function": "Door.width", "body": "return 1"}, 'return "é"', "return 1"),
        (
            {"function": "open", "body": "return 1\nreturn 2"},
            "):\n    self.check(key)",
            "):\n    return 1\n    return 2",
        ),
    ],
)
def test_a_guard_is_found_by_its_function_and_few_words(changes: dict[str, Any], old: str, new: str) -> None:
    removal = Removal(**{"row": "", "caught_by": frozenset(), "file": "x.py", "function": "Door.open"} | changes)
    assert removal.remove_from(SOURCE) == SOURCE.replace(old, new, 1) != SOURCE


@pytest.mark.parametrize(
    "changes",
    [
        {"function": "Door.close", "drop": "raise"},
        {"function": "Door.open", "drop": "raise Allowed"},
        {"function": "Door", "replace": ("key", "lock")},
        {"replace": ("self.check", "pass")},
    ],
)
def test_a_missing_or_repeated_guard_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"there are|holds"):
        Removal(row="", caught_by=frozenset(), file="x.py", **changes).remove_from(SOURCE)
