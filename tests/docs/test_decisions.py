"""docs/adr: every number that a decision ever had leads to a living file."""

import re

import pytest

from tests.docs import facts

# The records up to 0160, before they were merged into living files.
OLD_NUMBERS = [
    *range(1, 23), *range(24, 28), 29, 30, 31, 32, 35, 36, *range(40, 47), 48, 49, *range(52, 55), *range(56, 65), 67,
    68, 78, 80, 81, 82, 85, *range(88, 103), 104, *range(106, 112), 120, 121, 124, *range(130, 133), 134, 135,
    *range(138, 146), 148, 151, *range(155, 161),
]  # fmt: skip
CITED = re.compile(r"\bADRs? (\d{1,4})\b|docs/adr/(\d{4})")


@pytest.mark.parametrize("number", OLD_NUMBERS)
def test_an_old_number_leads_to_a_file(number: int) -> None:
    assert facts.decisions()[number].exists()


def test_every_file_is_in_the_map_under_its_number() -> None:
    files = {int(path.name[:4]): path for path in (facts.ROOT / "docs" / "adr").glob("[0-9]*.md")}
    assert {number: facts.decisions().get(number) for number in files} == files


def test_numbers_cited_in_code_lead_to_a_file() -> None:
    cited = {
        (name, int(number))
        for name in facts.files()
        if re.search(r"\.(py|lua|h|cpp|toml|yml|yaml)$", name) and not name.startswith("tests/docs/")
        for pair in CITED.findall((facts.ROOT / name).read_text())
        for number in pair
        if number
    }
    assert len(cited) > 10  # the pattern finds citations
    assert {(name, number) for name, number in cited if number not in facts.decisions()} == set()


def test_a_number_without_a_row_is_missing() -> None:
    text = (facts.ROOT / "docs" / "adr" / "README.md").read_text()
    assert 159 not in facts.decision_map(text.replace(", 0159", ""))
