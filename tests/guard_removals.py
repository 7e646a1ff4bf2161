"""make mutants: remove each guard of docs/internals/security-model.md in turn, and check that its tests fail.

    python -m tests.guard_removals [WORD ...]       guards whose class or file contains a word; default: all

guard_removals.toml lists the guards and says how to add one. Guards are removed in a copy of the working tree. A
removal
is caught if every test of its `caught_by` fails, does not end, or kills the process. Exits with 1 if a removal
survives.
A test that fails before it begins (a fixture, an import) has caught nothing.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.guard_edits import Source

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
END_SECONDS = 240.0  # the slowest takes 20 s on two idle cores
MEMORY_BYTES = 16 * 2**30  # of address space; without its guard a test may take all memory

_FAILED = re.compile(r"^FAILED tests/(\S+?\.py)::(?:\w+::)*(\w+)", re.MULTILINE)


class Removal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    row: str = msgspec.field(name="class")  # as in docs/internals/security-model.md
    caught_by: frozenset[str]  # path under tests/ :: name
    file: str = ""
    function: str = ""  # qualified name of a function or class; empty: anywhere in the file
    drop: str = ""
    body: str = ""
    replace: tuple[str, str] = ("", "")
    environ: dict[str, str] = {}
    seconds: int = 20  # per test; a request that should have been refused may wait forever

    def remove_from(self, text: str) -> str:
        """Remove the guard; raise ValueError unless it exists exactly once."""
        source = Source(text)
        if self.drop:
            return source.without_statement(self.function, self.drop)
        if self.body:
            return source.with_body(self.function, self.body)
        return source.with_words(self.function, *self.replace)

    def __str__(self) -> str:
        what = self.drop or self.body or self.replace[0].strip() or str(self.environ)
        return f"{self.file} {self.function} {what.splitlines()[0][:60]}"


def removals() -> list[Removal]:
    return msgspec.convert(tomllib.loads(TABLE.read_text())["removal"], list[Removal])


def named_tests() -> dict[str, frozenset[str]]:
    """Return each class of the table with all tests that catch a removal of its guards."""
    found: dict[str, frozenset[str]] = {}
    for removal in removals():
        found[removal.row] = found.get(removal.row, frozenset()) | removal.caught_by
    return found


def documented_classes() -> list[str]:
    """Return the first cell of each row under "Classes of holes" in docs/internals/security-model.md."""
    page = (ROOT / "docs" / "internals" / "security-model.md").read_text()
    text = page.partition("## Classes of holes")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row not in ("class", "---")]


def copy_tree(target: Path) -> None:
    """Copy tracked files, and untracked files that git does not ignore."""
    command = ["git", "ls-files", "-zco", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")[:-1]
    for name in names:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def survivors(removal: Removal, tree: Path) -> frozenset[str]:
    """Return tests of `caught_by` that pass without the guard; `tree` is restored."""
    path = tree / removal.file
    whole = path.read_text() if removal.file else ""
    try:
        if removal.file:
            path.write_text(removal.remove_from(whole))
        return removal.caught_by - failing(removal.caught_by, tree, removal.environ, removal.seconds)
    finally:
        if removal.file:
            path.write_text(whole)


def failing(tests: Iterable[str], tree: Path, environ: dict[str, str], seconds: int) -> frozenset[str]:
    """Return the tests that fail; all of them if they do not end or kill the process."""
    files, names = zip(*(test.split("::") for test in sorted(tests)), strict=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider"]
    command += ["--timeout", f"{seconds}", *(["--exitfirst"] if len(names) == 1 else [])]
    command += ["-k", " or ".join(names), *sorted({f"tests/{file}" for file in files})]
    # No bytecode: Python's cache does not notice a file that is changed and restored within a second.
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **environ}
    try:
        ran = subprocess.run(
            command, cwd=tree, env=environ, capture_output=True, text=True, check=False, timeout=END_SECONDS,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"          no end within {END_SECONDS:g} s", flush=True)
        return frozenset(tests)
    if ran.returncode < 0:
        print(f"          signal {-ran.returncode}", flush=True)
        return frozenset(tests)
    return frozenset(f"{file}::{name}" for file, name in _FAILED.findall(ran.stdout))


def main(words: list[str]) -> int:
    chosen = [one for one in removals() if not words or any(word in one.row + one.file for word in words)]
    num_survived = 0
    with tempfile.TemporaryDirectory(prefix="ps-mutants-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        for removal in chosen:
            survived = survivors(removal, tree)
            num_survived += bool(survived)
            print(f"{'SURVIVES' if survived else 'caught'}  {removal.row}  {removal}", flush=True)
            for test in sorted(survived):
                print(f"          passes: {test}", flush=True)
    print(f"{len(chosen) - num_survived} of {len(chosen)} removals are caught")
    return min(1, num_survived)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
