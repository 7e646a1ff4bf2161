"""The questions of `pagestream doctor` to a machine that serves on its CPU: what the processor has, whether the C++
kernels are there, and which number format a worker takes.

It serves doctor.py, which asks a process of torch's on its behalf. It knows no kernel and no format.
"""

from pathlib import Path

from pagestream.store_checks import Finding

CPUINFO = Path("/proc/cpuinfo")
# A flag of Linux's -> what it is called, in the order of the products of 8 bits that they allow.
_INSTRUCTION_SETS = {"avx2": "AVX2", "avx512_vnni": "AVX-512 VNNI", "avx512_bf16": "AVX-512 BF16", "amx_int8": "AMX"}
_VNNI = "AVX-512 VNNI"


def instruction_sets(cpuinfo: Path = CPUINFO) -> list[str]:
    """Return those of the processor for which products have kernels, here or in torch; none where nobody says."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [name for flag, name in _INSTRUCTION_SETS.items() if flag in flags]


def check_cpu_kernels(is_there: bool, told: str, found: list[str]) -> Finding:
    """`told`: by `python -m kernels.cpu`, of the library in C++ that a worker on a CPU builds at its first start.

    `found`: as instruction_sets() tells.
    """
    if not is_there:
        hint = "an x86-64 processor with AVX2 and a C++ compiler: apt-get install g++"
        return Finding("cpu kernels", "warn", told, hint)
    has = f"; the processor has {', '.join(found)}" if found else ""
    slower = f" and no {_VNNI}, which multiplies 4 and 8 bits faster" if found and _VNNI not in found else ""
    return Finding("cpu kernels", "ok", f"{told}{has}{slower}")


def check_number_format(told: str) -> Finding:
    """`told`: what a worker would log of `--quantization auto`; empty where the model has no blocks, or not yet."""
    later = "--quantization auto is the checkpoint's own; as-stored once a GGUF file in Q4_0, Q4_1 or Q8_0 is converted"
    return Finding("number format", "ok", told or later)
