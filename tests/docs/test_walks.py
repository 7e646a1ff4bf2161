"""The four walks of docs/architecture.md: their files, functions and forms are in the code, and counted as it says."""

import ast
import re
from functools import cache

import pytest

from tests.docs.facts import ROOT, files

PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALKS = ["A chat, to the queue", "A token back", "A block", "A takeover"]
_FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|lua))(?:::(\w+))?`")


def walk(page: str, name: str) -> str:
    """The steps of one walk, without what stands before and behind them."""
    text = page.split(f"\n### {name}\n")[1].split("\n#", maxsplit=1)[0]
    return "\n".join(re.findall(r"(?m)^\d+\. .*(?:\n +.*)*", text))


def steps(text: str) -> list[tuple[str, list[str]]]:
    """(what runs, the forms that cross) of each step."""
    found = re.split(r"(?m)^\d+\. ", text)[1:]
    sides = [" ".join(step.split()).partition(" → ") for step in found]
    return [(runs, [form.strip("`") for form in forms.split(", ")] if forms else []) for runs, _, forms in sides]


def files_of(text: str) -> set[str]:
    return {path for path, _ in _FILE.findall(text)}


def forms_of(text: str) -> set[str]:
    return {form for _, forms in steps(text) for form in forms}


@cache
def defined(path: str) -> tuple[frozenset[str], frozenset[str]]:
    """(functions and methods, classes) of a file; a script has none."""
    if path not in files() or not path.endswith(".py"):
        return frozenset(), frozenset()
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(functions), frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef))


def false_steps(text: str) -> list[str]:
    """Files that are not there, functions that are not in them, and forms that no file of the walk defines."""
    found = [path for path in sorted(files_of(text)) if path not in files()]
    found += [f"{path}::{name}" for path, name in _FILE.findall(text) if name and name not in defined(path)[0]]
    classes = {name for path in files_of(text) for name in defined(path)[1]}
    return found + sorted(form for form in forms_of(text) if form[0].isupper() and form not in classes)


def told_counts(page: str, name: str) -> tuple[int, int]:
    """(files, forms) as the table has them."""
    ((num_files, num_forms),) = re.findall(rf"(?m)^\| {name} \| \d+ \| (\d+) \| \d+ \| (\d+) \|$", page)
    return int(num_files), int(num_forms)


def test_every_walk_is_looked_at() -> None:
    section = PAGE.split("\n## Four walks\n")[1].split("\n## ")[0]
    assert re.findall(r"(?m)^### (.*)$", section) == WALKS


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_leads_through_what_is_there(name: str) -> None:
    text = walk(PAGE, name)
    assert false_steps(text) == []
    assert [runs for runs, _ in steps(text) if not files_of(runs)] == []  # a step without a file


@pytest.mark.parametrize("name", WALKS)
def test_the_table_counts_the_walk(name: str) -> None:
    text = walk(PAGE, name)
    assert told_counts(PAGE, name) == (len(files_of(text)), len(forms_of(text)))


PLANTED = """
### A chat, to the queue
1. Read: `gateway/answers/answering.py::answer`, `gateway/answers/asking.py::ask`
   → bytes, `AnswerKind`
2. Decode: `gateway/requests/request_body.py::decode_twice` → `JsonBody`

Behind them, `gateway/none.py`.
"""


def test_planted_falsehoods_are_found() -> None:
    text = walk(PLANTED, WALKS[0])
    assert false_steps(text) == [
        "gateway/answers/asking.py",
        "gateway/answers/asking.py::ask",
        "gateway/requests/request_body.py::decode_twice",
        "AnswerKind",
    ]
    assert (len(files_of(text)), forms_of(text)) == (3, {"bytes", "AnswerKind", "JsonBody"})
