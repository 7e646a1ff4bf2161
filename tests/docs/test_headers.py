"""The headers of product files: each says what its file does not know, and where it stands in the walks.

By words, so a header can only be held to name the two, not to be right.
"""

import ast
import re

import pytest

from tests.docs.facts import ROOT

FOLDERS = ("engine_worker", "gateway", "kernels", "pagestream", "shared")
_IGNORANCE = re.compile(r"\bknows?\b", re.IGNORECASE)
# The steps of docs/architecture.md as headers name them, or that there is none.
_PLACE = re.compile(
    r"\bwalks?\b|\bway (in|back)\b|takeover|\bstarts?\b|\bserves\b|\bused\b|\bruns? (it|once)\b|first phase"
    r"|\b(in|of) (a|each|every) step\b|behind the end|between two steps",
    re.IGNORECASE,
)


def without(words: re.Pattern[str]) -> list[str]:
    """The files whose header has none of `words`."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [
        str(path.relative_to(ROOT))
        for path in paths
        if not words.search(ast.get_docstring(ast.parse(path.read_text())) or "")
    ]


@pytest.mark.parametrize("words", [_IGNORANCE, _PLACE], ids=["what it does not know", "where it stands"])
def test_every_header_says(words: re.Pattern[str]) -> None:
    assert without(words) == []
