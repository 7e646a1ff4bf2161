"""The library of C++ kernels, and one with only the AVX-512 functions where the processor has no AVX-512."""

import pytest

from kernels.cpu.build import NoLibrary
from kernels.cpu.library import CpuLibrary, InstructionSet, cpu_library
from tests.kernels.cpu.emulation import EmulatedLibrary, emulated


@pytest.fixture(scope="session", params=["this processor", "AVX-512 by SIMDe"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    try:
        found = cpu_library()
    except NoLibrary as error:
        pytest.skip(f"no C++ kernels here: {error}")
    if request.param == "this processor":
        return found
    if InstructionSet.AVX512_VNNI in found.instruction_sets:
        pytest.skip("this processor has AVX-512 itself")
    return EmulatedLibrary(emulated("step_avx512.cpp", tmp_path_factory.mktemp("simde")))
