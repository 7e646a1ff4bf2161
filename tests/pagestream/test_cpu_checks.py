"""`pagestream doctor` reports the CPU's features and the number format that a worker would use."""

from pathlib import Path

import pytest

from pagestream.cpu_checks import check_cpu_kernels, check_number_format, instruction_sets


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fpu sse4_2", []),
        ("fpu avx2 f16c", ["AVX2"]),
        ("avx512_bf16 avx2 avx512_vnni", ["AVX2", "AVX-512 VNNI", "AVX-512 BF16"]),
        ("amx_tile amx_int8 avx512_vnni avx2", ["AVX2", "AVX-512 VNNI", "AMX"]),
    ],
)
def test_instruction_sets_are_those_of_the_processor(flags: str, found: list[str], tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nmodel name\t: avx2 by name\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert instruction_sets(file) == found


def test_unknown_system_has_no_instruction_sets(tmp_path: Path) -> None:
    assert instruction_sets(tmp_path / "no such file") == []


def test_avx2_alone_is_reported_as_slower() -> None:
    finding = check_cpu_kernels(True, "AVX2, /cache/cpu-0.so", ["AVX2"])
    assert finding.status == "ok" and not finding.hint
    assert finding.message.startswith("AVX2, /cache/cpu-0.so; the processor has AVX2 but not AVX-512 VNNI, which")
    faster = check_cpu_kernels(True, "AVX512_VNNI, /x.so", ["AVX2", "AVX-512 VNNI", "AMX"])
    assert faster.message == "AVX512_VNNI, /x.so; the processor has AVX2, AVX-512 VNNI, AMX"
    assert check_cpu_kernels(True, "to be compiled", []).message == "to be compiled"


def test_kernels_that_cannot_be_built_are_a_warning() -> None:
    finding = check_cpu_kernels(False, "none: there is no C++ compiler", ["AVX2"])
    assert (finding.status, finding.message) == ("warn", "none: there is no C++ compiler")
    assert "apt-get install g++" in finding.hint


def test_number_format_is_what_a_worker_would_log() -> None:
    assert check_number_format("auto is as-stored: why").message == "auto is as-stored: why"
    assert "as-stored for GGUF files" in check_number_format("").message
