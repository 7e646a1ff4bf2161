"""Run AVX-512 code on any machine: a source of csrc/ compiled with SIMDe, which emulates each instruction."""

import ctypes
import shlex
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.cpu.library import CpuLibrary, InstructionSet

SIMDE = Path("/usr/include/simde/x86/avx512.h")
_SPEED = ("-O", "-W")  # flags that change no result; optimized only to compile faster


def emulated(source: str, directory: Path) -> ctypes.CDLL:
    """Return the functions of csrc/`source`, built in `directory`; skip the test if SIMDe is missing."""
    if not SIMDE.is_file():
        pytest.skip("no SIMDe to emulate AVX-512 with: apt-get install libsimde-dev")
    library = directory / f"{Path(source).stem}.so"
    flags = [*(flag for flag in build.FLAGS if not flag.startswith(_SPEED)), *build.AVX2, "-O1"]
    header = str(Path(__file__).with_name("simde_avx512.h"))
    command = [
        *build.compiler(),
        *flags,
        "-include",
        header,
        "-shared",
        str(build.SOURCES / source),
        str(build.SOURCES / "program.cpp"),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[:2000]}"
    return ctypes.CDLL(str(library))


class EmulatedLibrary(CpuLibrary):
    """The library of a processor that has only AVX-512."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self.functions = functions
        self.instruction_sets = (InstructionSet.AVX512_VNNI,)
