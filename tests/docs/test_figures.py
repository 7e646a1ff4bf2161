"""bench/results holds summaries, and the figures of docs/benchmarks are in them.

A table after the line `<!-- figures: TOPIC -->` is compared with bench/results/TOPIC.json. Each number of its cells
must be a median or an end of a spread there, rounded as shown, in the unit shown. Columns of ratios and aims are not
compared, and first cells name a case.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.docs.facts import ROOT, files

RESULTS = ROOT / "bench" / "results"
TRACKED = sorted(ROOT / name for name in files() if name.startswith("bench/results/"))
SUMMARIES = [path for path in TRACKED if path.parent == RESULTS and path.suffix == ".json"]
PAGES = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
DERIVED_COLUMNS = re.compile(r"ratio|aim|share|gateways|commit|command|case|texts|server|limit", re.IGNORECASE)
UNITS = (1.0, 1e3, 1e6, 1e-6, 100.0)  # seconds as ms or us, bytes as MB, a share as a percentage
MAX_RESULT_BYTES = 250_000


@cache
def known_values(topic: str) -> tuple[float, ...]:
    summary = json.loads((RESULTS / f"{topic}.json").read_text())
    return tuple(sorted({value for source in summary["sources"] for value in numbers(source["figures"])}))


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [float(value)]


def tables(text: str) -> list[tuple[str, list[list[str]]]]:
    """Return (topic, rows with the head first) of each table that names its summary."""
    found = re.findall(r"(?m)^<!-- figures: ([\w-]+) -->\n((?:\|.*\n?)+)", text)
    return [(topic, [row.strip().strip("|").split("|") for row in table.splitlines()]) for topic, table in found]


def unknown_figures(text: str) -> list[str]:
    unknown = []
    for topic, (head, _, *rows) in tables(text):
        for row in rows:
            titled = list(zip(head, row, strict=True))[1:]
            cells = [cell for title, cell in titled if not DERIVED_COLUMNS.search(title)]
            shown = [number for cell in cells for number in figures(cell)]
            unknown += [f"{topic}: {number} in {row[0].strip()}" for number in shown if not is_known(number, topic)]
    return unknown


def figures(cell: str) -> list[str]:
    plain = re.sub(r"`[^`]*`|\d+ (?:of|x) \S+|p\d\d", "", cell)
    found = re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*\w)", plain)
    return [number.replace(",", "") for number in found]


def is_known(shown: str, topic: str) -> bool:
    """Whether a value of the summary is shown so, give or take a unit of the last digit shown."""
    decimals = len(shown.partition(".")[2])
    number, step = float(shown), 10.0**-decimals
    return any(abs(value * unit - number) <= 0.6 * step for value in known_values(topic) for unit in UNITS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_figures_are_in_their_summary(page: Path) -> None:
    assert unknown_figures(page.read_text()) == []


def test_a_false_figure_is_found() -> None:
    table = "| case | vLLM | ours | ratio |\n|---|---|---|---|\n| 1 x 1k | 3.35 | **2.41** | 0.9 |\n"
    text = f"<!-- figures: fp8 -->\n{table}"
    assert unknown_figures(text) == ["fp8: 2.41 in 1 x 1k"]


def test_many_figures_are_compared() -> None:
    compared = [cell for page in PAGES for _, rows in tables(page.read_text()) for row in rows[2:] for cell in row[1:]]
    assert sum(len(figures(cell)) for cell in compared) > 400


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.name)
def test_a_summary_names_its_origin(path: Path) -> None:
    summary = json.loads(path.read_text())
    for source in summary["sources"]:
        assert re.fullmatch(r"[0-9a-f]{7,40}", source["raw_commit"])
        assert source["raw"] and source["runs"] >= 1 and source["figures"]


def test_results_are_summaries_of_limited_size() -> None:
    assert TRACKED == SUMMARIES
    assert sum(path.stat().st_size for path in SUMMARIES) <= MAX_RESULT_BYTES
