"""Compare answers, metrics and options with the golden files. `python -m tests.golden` rewrites the files."""

from pathlib import Path

import pytest

from tests.golden.normalized import normalized
from tests.golden.recording import MAX_MODEL_LEN, recorded
from tests.tiny_model import write_tiny_model

FILES = Path(__file__).parent / "files"


async def test_golden_files_are_up_to_date(tmp_path: Path) -> None:
    expected = {path.name: path.read_text() for path in FILES.glob("*.txt")}
    got = await recorded(write_tiny_model(tmp_path / "tiny", MAX_MODEL_LEN))
    assert sorted(got) == sorted(expected)
    for name, text in got.items():
        assert text.splitlines() == expected[name].splitlines(), f"{name}: python -m tests.golden"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ('{"error": {"message": "a \\" b", "code": "c"}}', '{"error": {"message": "d", "code": "c"}}', True),
        ('{"error": {"message": "a", "code": "c"}}', '{"error": {"message": "a", "code": "d"}}', False),
        ('{"created":1}', '{"created":22}', True),
        ('{"index":1}', '{"index":2}', False),
        ("chatcmpl-" + "a" * 32, "chatcmpl-" + "b" * 32, True),
        ("chatcmpl-" + "a" * 32, "cmpl-" + "a" * 32, False),
        ("a" * 32 + "b" * 32, "a" * 64, False),
    ],
)
def test_normalized_text_keeps_what_clients_read(one: str, other: str, is_same: bool) -> None:
    assert (normalized(one) == normalized(other)) == is_same
