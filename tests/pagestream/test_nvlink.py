"""NVLink detection through a C library that answers as the driver's does."""

import subprocess
from itertools import combinations
from pathlib import Path

import pytest

from pagestream.nvlink import nvlinks

pytestmark = pytest.mark.e2e  # compiles C code
SOURCE = Path(__file__).with_name("fake_nvml.c")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return str(library)


def pairs(*names: str) -> set[frozenset[str]]:
    return {frozenset(name.split()) for name in names}


def test_links_match_the_driver(library: str) -> None:
    four = {frozenset(map(str, pair)) for pair in combinations(range(4, 8), 2)}
    assert nvlinks([str(index) for index in range(8)], library) == pairs("0 3", "1 2") | four


def test_links_are_found_by_uuid(library: str) -> None:
    assert nvlinks(["GPU-0", "2", "GPU-3"], library) == pairs("GPU-0 GPU-3")


@pytest.mark.parametrize("gpus", [["0", "3", "12"], ["0", "3", "MIG-8f"], ["0", "3", "9"]], ids=str)
def test_unknown_or_mixed_gpu_names_have_no_links(library: str, gpus: list[str]) -> None:
    assert nvlinks(gpus, library) == ()


def test_a_machine_without_the_library_has_no_links() -> None:
    assert nvlinks(["0", "1"], "/absent/libnvidia-ml.so.1") == ()
