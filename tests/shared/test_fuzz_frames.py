"""The fuzzer's first inputs, the same on every machine (`make fuzz` is a minute of others), and proof that it finds
what there is to find."""

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


def test_thirty_thousand_inputs() -> None:
    num_tried, num_decoded = fuzz_frames.fuzz(fuzz_frames.up_to(30_000), seed=1)
    assert num_tried == 30_000
    assert num_decoded > num_tried / 10  # enough gets through to the types and beyond


def test_a_hundred_thousand_in_little_memory() -> None:
    """Of processes whose address space is limited."""
    command = [sys.executable, "-m", "tests.shared.fuzz_frames", "--inputs", "50000", "--seed"]
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
        fuzz_frames.fuzz(fuzz_frames.up_to(30_000), seed=1)
