"""A minute of the fuzzer (`make fuzz ARGS='--seed N'` is another), and proof that it finds what there is to find."""

import subprocess
import sys
from pathlib import Path

import pytest

from shared.messages import FormatError
from tests.shared import fuzz_frames

ROOT = Path(__file__).parents[2]


def test_every_decoder_is_fuzzed() -> None:
    names = {decode.__name__ for decode in fuzz_frames.DECODERS}
    assert {"decode_request", "decode_event_batch", "decode_heartbeat", "decode_journal", "decode_kv_snapshot"} <= names


@pytest.mark.parametrize("sample", fuzz_frames.valid_samples(), ids=lambda sample: f"{len(sample)}-bytes")
def test_every_sample_is_somebodys_message(sample: bytes) -> None:
    def decodes(decode) -> bool:
        try:
            return decode(sample) is not None
        except FormatError:
            return False

    assert any(decodes(decode) for decode in fuzz_frames.DECODERS)


def test_two_seconds_of_it() -> None:
    num_tried, num_decoded = fuzz_frames.fuzz(2.0, seed=1)
    assert num_tried > 100
    assert num_decoded > num_tried / 10  # enough gets through to the types and beyond


def test_a_minute_of_it() -> None:
    """30 s on each of two cores."""
    command = [sys.executable, "-m", "tests.shared.fuzz_frames", "--seconds", "30", "--seed"]
    processes = [subprocess.Popen([*command, seed], cwd=ROOT, stdout=subprocess.DEVNULL) for seed in ("2", "3")]
    assert [process.wait() for process in processes] == [0, 0]


@pytest.mark.parametrize(
    "broken",
    [lambda data: data.decode(), lambda data: data[40], lambda data: data.index(b"\xdd")],
    ids=["UTF-8", "index", "absent"],
)
def test_another_error_is_found(monkeypatch: pytest.MonkeyPatch, broken) -> None:
    monkeypatch.setattr(fuzz_frames, "DECODERS", [broken])
    with pytest.raises((ValueError, IndexError)):
        fuzz_frames.fuzz(5.0, seed=1)
