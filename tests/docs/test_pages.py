"""What docs/ says of settings, routes and metrics is what the code has, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, filled, pages

ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "changes/README.md")
ALL_PAGES = [*(DOCS.parent / name for name in ROOT_PAGES), *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("name", pages())
def test_generated_tables_match_the_code(name: str) -> None:
    text = (DOCS / name).read_text()
    assert text == filled(text, pages()[name]), "python -m tests.docs.pages"


def dead_links(page: Path, text: str) -> list[str]:
    """Return links to files that do not exist, and to headings that their page does not have."""
    found = []
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        if not path.exists() or (heading and heading not in anchors(path.read_text())):
            found.append(f"{target}#{heading}" if heading else target)
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


def test_planted_dead_links_are_found() -> None:
    page = DOCS / "guides" / "docker.md"
    text = "[a](kubernetes.md#probes) [b](kubernetes.md#no-such) [c](no_such.md) [d](#images)"
    assert dead_links(page, text) == ["kubernetes.md#no-such", "no_such.md"]
