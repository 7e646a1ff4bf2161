"""The words of docs/architecture.md: those that it forbids are in no name, comment or page; docstrings are sentences.

What is left of them is counted by folder. A count may only shrink; a folder that is not listed has none.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.facts import ROOT

FOLDERS = (
    "bench",
    "deploy",
    "docs",
    "engine_worker",
    "gateway",
    "kernels",
    "monitoring",
    "pagestream",
    "shared",
    "tests",
)
SUFFIXES = {".py", ".lua", ".md", ".toml", ".js"}
HERE = ("docs/architecture.md", "tests/docs/test_words.py")  # which name the words
WORDS_LEFT = {"gateway": 1, "tests": 1}  # an error message that clients have seen, and its test
DOCSTRINGS_LEFT = {"tests": 97}

_NO_SUBJECT = re.compile(r"(Of|Those|The same|So many|What|Where)\b")
_MAY_HAVE_NONE = re.compile(rf"""["']\s*{_NO_SUBJECT.pattern}""")  # a string that begins so; most files have none


def forbidden() -> list[str]:
    """Words and phrases of the table's right side."""
    table = (ROOT / "docs" / "architecture.md").read_text().split("| we say | and not |")[1].split("\n\n")[0]
    cells = [line.split("|")[2] for line in table.strip().splitlines()[1:]]
    return [entry.strip() for cell in cells for entry in re.sub(r"\(.*?\)", "", cell).split(",")]


def plain(text: str) -> str:
    """Lower case, with names taken apart and a line's end, or the sign of a comment, as one space."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return re.sub(r"[\s_#]+", " ", apart).lower()


def found_in(text: str, phrases: list[str]) -> list[str]:
    """Every occurrence of `phrases` in `text`."""
    return re.findall(rf"(?<![a-z])(?:{'|'.join(phrases)})(?![a-z-])", plain(text))


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a Python file: its own, and those of its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def files() -> Iterator[tuple[str, Path]]:
    """(folder, file) of all that is read by people; the folder of a page at the top is ""."""
    yield from (("", path) for path in ROOT.glob("*.md"))
    for folder in FOLDERS:
        paths = sorted((ROOT / folder).rglob("*"))
        yield from ((folder, path) for path in paths if path.suffix in SUFFIXES and "results" not in path.parts)


def too_many(counts: Counter[str], left: dict[str, int]) -> dict[str, int]:
    """Folders with more than is left for them."""
    return {folder: number for folder, number in counts.items() if number > left.get(folder, 0)}


def test_forbidden_words_are_gone() -> None:
    phrases = forbidden()
    assert len(phrases) > 15
    counts, places = Counter[str](), []
    for folder, path in files():
        where = path.relative_to(ROOT).as_posix()
        if where in HERE:
            continue
        found = found_in(path.read_text(), phrases)
        counts[folder] += len(found)
        places += [f"{where}: {word}" for word in found]
    assert too_many(counts, WORDS_LEFT) == {}, "\n".join(places)


def test_docstrings_have_a_subject() -> None:
    counts, places = Counter[str](), []
    for folder, path in files():
        if path.suffix == ".py" and _MAY_HAVE_NONE.search(path.read_text()):
            found = [text.splitlines()[0] for text in docstrings(path.read_text()) if _NO_SUBJECT.match(text)]
            counts[folder] += len(found)
            places += [f"{path.relative_to(ROOT)}: {line}" for line in found]
    assert too_many(counts, DOCSTRINGS_LEFT) == {}, "\n".join(places)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("def suits_copy_engine(): ...", "copy engine"),
        ("# filled by the copy\n    # engine, in turn", "copy engine"),
        ("class RequestAsker: ...", "asker"),
        ("THOUGHTS = 1", "thoughts"),
    ],
)
def test_a_forbidden_word_is_seen_however_it_is_written(text: str, phrase: str) -> None:
    assert found_in(text, [phrase]) == [phrase]


@pytest.mark.parametrize("text", ["COPY engine_worker", "masker", "bookshelf"])
def test_a_word_with_another_one_in_it_is_none(text: str) -> None:
    assert found_in(text, ["copy engines", "asker", "books"]) == []
