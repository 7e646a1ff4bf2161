"""What docs/ says of settings and metrics is what the code has, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, filled, pages


@pytest.mark.parametrize("name", pages())
def test_a_page_tells_what_the_code_has(name: str) -> None:
    text = (DOCS / name).read_text()
    assert text == filled(text, pages()[name]), "python -m tests.docs.pages"


@pytest.mark.parametrize("page", [*DOCS.glob("*.md"), DOCS.parent / "README.md"], ids=lambda page: page.name)
def test_links_and_pictures_are_there(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []
