"""AVX-512 on any machine: a source of csrc/ compiled against SIMDe, which says what each instruction does in others."""

import ctypes
import shlex
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.cpu.library import CpuLibrary, InstructionSet

SIMDE = Path("/usr/include/simde/x86/avx512.h")
_SPEED = ("-O", "-W")  # flags that change no result: unoptimised it compiles in a third of the time


def emulated(source: str, directory: Path) -> ctypes.CDLL:
    """The functions of csrc/`source`; `directory` is for the library. Skips the test where there is no SIMDe."""
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
    """A processor that has AVX-512 alone."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self.functions = functions
        self.instruction_sets = (InstructionSet.AVX512_VNNI,)
