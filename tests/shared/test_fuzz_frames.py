"""The fuzzer's first inputs, equal on every machine (`make fuzz` runs others), and proof that it detects errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from shared.messages import FormatError
from tests.shared import fuzz_frames

ROOT = Path(__file__).parents[2]


def test_fuzz_covers_every_decoder() -> None:
    names = {decode.__name__ for decode in fuzz_frames.DECODERS}
    assert {"decode_request", "decode_event_batch", "decode_heartbeat", "decode_journal", "decode_kv_snapshot"} <= names


@pytest.mark.parametrize("sample", fuzz_frames.valid_samples(), ids=lambda sample: f"{len(sample)}-bytes")
def test_fuzz_every_sample_is_a_valid_message(sample: bytes) -> None:
    def decodes(decode) -> bool:
        try:
            return decode(sample) is not None
        except FormatError:
            return False

    assert any(decodes(decode) for decode in fuzz_frames.DECODERS)


def test_fuzz_thirty_thousand_inputs_are_decoded_or_refused() -> None:
    num_tried, num_decoded = fuzz_frames.fuzz(fuzz_frames.up_to(30_000), seed=1)
    assert num_tried == 30_000
    assert num_decoded > num_tried / 10  # enough inputs pass the parser and reach the types


def test_fuzz_hundred_thousand_inputs_take_little_memory() -> None:
    """The processes have a limited address space."""
    command = [sys.executable, "-m", "tests.shared.fuzz_frames", "--inputs", "50000", "--seed"]
    processes = [subprocess.Popen([*command, seed], cwd=ROOT, stdout=subprocess.DEVNULL) for seed in ("2", "3")]
    assert [process.wait() for process in processes] == [0, 0]


@pytest.mark.parametrize(
    "broken",
    [lambda data: data.decode(), lambda data: data[40], lambda data: data.index(b"\xdd")],
    ids=["UTF-8", "index", "absent"],
)
def test_fuzz_detects_other_errors(monkeypatch: pytest.MonkeyPatch, broken) -> None:
    monkeypatch.setattr(fuzz_frames, "DECODERS", [broken])
    with pytest.raises((ValueError, IndexError)):
        fuzz_frames.fuzz(fuzz_frames.up_to(30_000), seed=1)
