"""Compare formats by the scores that each gives to the same tokens."""

import math
from pathlib import Path
from typing import Any

import pytest

from bench.quality.comparison import Scored, change, deviation_of_change, same_likeliest
from bench.quality.word_perplexity import BASE, BASE_OF_TRANSFORMERS, main, rows, table

WORDS = 6


def answer(*windows: tuple[list[int], list[int], list[float]]) -> dict[str, Any]:
    """Return an answer.

    Each window has its tokens, the likeliest next tokens, and the log-probabilities of all but the first token.
    """
    names = ("token_ids", "likeliest", "log_probabilities")
    total = sum(sum(scores) for _, _, scores in windows)
    made = [dict(zip(names, window, strict=True)) for window in windows]
    return {"word_perplexity": math.exp(-total / WORDS), "words": WORDS, "windows": made, "versions": {}}


EXACT = answer(([1, 5, 6], [5, 6, 7], [-1.0, -2.0]), ([1, 8, 9, 3], [8, 2, 3, 4], [-1.5, -0.5, -3.0]))
# The windows in the other order, one likeliest token of seven changed, and each score slightly lower.
ROUNDED = answer(([1, 8, 9, 3], [8, 2, 0, 4], [-1.6, -0.5, -3.4]), ([1, 5, 6], [5, 6, 7], [-1.1, -2.0]))
# transformers gives no prediction after a window's last token; a server gives one.
WITH_LAST = answer(([1, 5, 6], [5, 6, 7], [-1.0, -2.0, -9.0]), ([1, 8, 9, 3], [8, 2, 3, 4], [-1.5, -0.5, -3.0, -9.0]))


def test_change_is_relative_and_share_counts_all_tokens() -> None:
    exact, rounded = Scored.of(EXACT), Scored.of(ROUNDED)
    assert change(rounded, exact) == pytest.approx(math.exp(0.6 / WORDS) - 1)
    assert same_likeliest(rounded, exact) == 6 / 7
    assert exact.tokens == 7


def test_deviation_is_of_paired_token_differences() -> None:
    differences = [0.1, 0.0, 0.1, 0.0, 0.4]
    mean = sum(differences) / 5
    variance = sum((difference - mean) ** 2 for difference in differences) / 4
    expected = math.sqrt(variance * 5) / WORDS
    assert deviation_of_change(Scored.of(ROUNDED), Scored.of(EXACT)) == pytest.approx(expected)
    assert deviation_of_change(Scored.of(ROUNDED), Scored.of(WITH_LAST)) == pytest.approx(expected)
    assert deviation_of_change(Scored.of(EXACT), Scored.of(WITH_LAST)) == 0.0


def test_sides_with_different_windows_are_refused() -> None:
    other = answer(([1, 5, 7], [5, 6, 7], [-1.0, -2.0]))
    with pytest.raises(ValueError, match="different windows"):
        deviation_of_change(Scored.of(other), Scored.of(EXACT))


def test_table_has_the_rows_that_its_sides_allow() -> None:
    (alone,) = rows({"int8": EXACT})
    assert alone == {"format": "int8", "word_perplexity": round(EXACT["word_perplexity"], 4)}
    made = rows({BASE_OF_TRANSFORMERS: WITH_LAST, BASE: EXACT, "int8": ROUNDED})
    assert [row["format"] for row in made] == [BASE_OF_TRANSFORMERS, BASE, "int8"]
    assert made[2]["same_likeliest"] == round(6 / 7, 4)
    assert made[2]["to_bfloat16"] == round(math.exp(0.1) - 1, 5)
    assert f"+{made[2]['to_bfloat16']:.2%}" in table(made).splitlines()[3]


def test_unknown_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--formats", "int8,int3", "--out", str(Path("never"))])
    error = capsys.readouterr().err
    assert "unknown formats: int3; allowed:" in error
    assert "as-stored" in error
