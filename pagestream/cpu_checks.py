"""Checks of `pagestream doctor` for serving on a CPU: instruction sets, C++ kernels, and the number format."""

from pathlib import Path

from pagestream.finding import Finding

CPUINFO = Path("/proc/cpuinfo")
# Flag in /proc/cpuinfo -> name, ordered by the speed of 8-bit linear layers.
_INSTRUCTION_SETS = {"avx2": "AVX2", "avx512_vnni": "AVX-512 VNNI", "avx512_bf16": "AVX-512 BF16", "amx_int8": "AMX"}
_VNNI = "AVX-512 VNNI"


def instruction_sets(cpuinfo: Path = CPUINFO) -> list[str]:
    """Return the processor's instruction sets that have linear-layer kernels, or none if unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [name for flag, name in _INSTRUCTION_SETS.items() if flag in flags]


def check_cpu_kernels(is_available: bool, status: str, found: list[str]) -> Finding:
    """Report the C++ kernels, which a worker on a CPU builds at its first start.

    Args:
        is_available: Whether the library is built or can be built.
        status: Output of `python -m kernels.cpu`.
        found: Result of instruction_sets().
    """
    if not is_available:
        hint = "needs an x86-64 processor with AVX2 and a C++ compiler: apt-get install g++"
        return Finding("cpu kernels", "warn", status, hint)
    has = f"; the processor has {', '.join(found)}" if found else ""
    slower = f" but not {_VNNI}, which is faster for 4 and 8 bits" if found and _VNNI not in found else ""
    return Finding("cpu kernels", "ok", f"{status}{has}{slower}")


def check_cpu_layers(is_compiled: bool, form: str) -> list[Finding]:
    """Report the code of the model's layers besides linear ones; nothing if the model cannot be read yet.

    Args:
        is_compiled: Whether it is C++.
        form: The code, with the reason if it is not C++; "" for an unknown model.
    """
    return [Finding("cpu layers", "ok" if is_compiled else "warn", form)] if form else []


def check_number_format(status: str) -> Finding:
    """Report `status`, the worker's choice for `--quantization auto`; empty if the model has no blocks yet."""
    default = "--quantization auto uses the checkpoint's format; as-stored for GGUF files in Q4_0, Q4_1 or Q8_0"
    return Finding("number format", "ok", status or default)
