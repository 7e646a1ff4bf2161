"""Directories of one model have one fingerprint, others another: those of the same shapes too, and torn copies."""

import os
import shutil
from pathlib import Path

import pytest

from engine_worker.execution.same_model import fingerprint
from tests.engine_worker.execution.reference import write_model


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "one")


def weights_of(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


def test_a_copy_is_the_same_model(model_dir: Path, tmp_path: Path) -> None:
    assert fingerprint(shutil.copytree(model_dir, tmp_path / "copy")) == fingerprint(model_dir)


def test_trained_on_it_is_another_one(model_dir: Path, tmp_path: Path) -> None:
    """Every weight a little off, of the same names, shapes and sizes."""
    other = weights_of(shutil.copytree(model_dir, tmp_path / "other"))
    with other.open("r+b") as file:
        length = 8 + int.from_bytes(file.read(8), "little")
        rest = bytearray(os.pread(file.fileno(), other.stat().st_size, length))
        rest[::4] = bytes(byte ^ 1 for byte in rest[::4])
        os.pwrite(file.fileno(), rest, length)
    assert other.stat().st_size == weights_of(model_dir).stat().st_size
    assert fingerprint(other.parent) != fingerprint(model_dir)


def test_a_torn_copy_is_another_one(model_dir: Path, tmp_path: Path) -> None:
    torn = weights_of(shutil.copytree(model_dir, tmp_path / "torn"))
    os.truncate(torn, torn.stat().st_size - 1)
    assert fingerprint(torn.parent) != fingerprint(model_dir)
