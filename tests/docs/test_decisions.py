"""docs/adr: each decision has its number, its status and one line in the index, which tells what is superseded."""

import re

import pytest

from tests.docs.facts import ROOT

FOLDER = ROOT / "docs" / "adr"
DECISIONS = {path.name: path.read_text() for path in sorted(FOLDER.glob("[0-9]*.md"))}
INDEX = (FOLDER / "README.md").read_text()


def listed(index: str) -> list[str]:
    return re.findall(r"\]\(([0-9]\S+\.md)\)", index)


def test_every_decision_is_listed_once() -> None:
    assert sorted(listed(INDEX)) == list(DECISIONS)


def test_one_that_is_forgotten_or_listed_twice_is_seen() -> None:
    line = next(line for line in INDEX.splitlines() if "](0003" in line)
    assert sorted(listed(INDEX.replace(line, ""))) != list(DECISIONS)
    assert sorted(listed(INDEX + line)) != list(DECISIONS)


def test_ten_are_to_be_read_first() -> None:
    assert len(listed(INDEX.split("## Ten to read first")[1].split("## ")[0])) == 10


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_has_its_number_and_its_status(name: str) -> None:
    first, second, third, *_ = DECISIONS[name].splitlines()
    assert re.match(rf"# {name[:4]}[.:] ", first)
    assert second == ""
    assert re.match(r"Status: (accepted|superseded by \d{4})", third)


def test_the_index_marks_what_is_superseded() -> None:
    """A status tells of what it changes; the index tells it of what is changed."""
    superseded = {name[:4] for name, text in DECISIONS.items() if "Status: superseded" in text}
    for line in INDEX.splitlines():
        if match := re.search(r"\[(\d{4})\]", line):
            assert ("~~" in line) == (match[1] in superseded), line


def test_absent_numbers_are_explained() -> None:
    told = re.search(r"or that was measured and left: ([\d,\s]+)\.", INDEX)
    assert told
    absent = {int(number) for number in re.findall(r"\d+", told[1])}
    have = {int(name[:4]) for name in DECISIONS}
    assert absent == set(range(1, max(absent))) - have | {max(absent)}
