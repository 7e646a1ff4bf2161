"""Build csrc/ into one shared library per state of its sources.

The library is found next to the sources (images ship it there) or in the user's cache. It has a C interface and uses no
header of torch or Python, so it does not depend on their versions and builds in a tenth of the time of a torch
extension: some seconds on two cores.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("csrc")
COMPILERS = ("g++", "clang++", "c++")
# -ffp-contract=off: a product and a sum are fused only where a source says so; otherwise instruction sets would differ.
FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
FLAGS_BY_SUFFIX = {"_avx2": AVX2, "_avx512": AVX512}  # by the end of the source's name
_MACHINES = ("x86_64", "AMD64")
_COMPILE_SECONDS = 300.0  # per source file; ten times the duration on a busy machine


class NoLibrary(RuntimeError):
    """No library is available on this machine; the message is a clause that gives the reason."""


def cache_directory() -> Path:
    """Return the cache directory for libraries built on demand; the same rule as pagestream/directories.py."""
    value = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(value) if os.path.isabs(value) else Path.home() / ".cache"
    return base / "pagestream" / "kernels"


def library_name() -> str:
    """Return the file name, which changes with every source, flag and machine type."""
    digest = hashlib.blake2b(repr((FLAGS, FLAGS_BY_SUFFIX, platform.machine())).encode(), digest_size=8)
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(b"%s %d " % (path.name.encode(), path.stat().st_size) + path.read_bytes())
    return f"cpu-{digest.hexdigest()}.so"


def installed_library() -> Path | None:
    """Return the library's path, or None before it is built."""
    name = library_name()
    return next((path for folder in (SOURCES.parent, cache_directory()) if (path := folder / name).is_file()), None)


def compiler() -> list[str]:
    """Return the compiler command: $CXX, or the first of COMPILERS on the PATH.

    Raises:
        NoLibrary: If the machine is not x86-64 or has no compiler.
    """
    if platform.machine() not in _MACHINES or os.name != "posix":
        raise NoLibrary(f"the kernels need x86-64, and this machine is {platform.machine()}")
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise NoLibrary(f"no C++ compiler found (tried {', '.join(COMPILERS)}); install one, e.g. apt-get install g++")
    return [found]


def build(directory: Path | None = None, extra_flags: tuple[str, ...] = (), links_openmp: bool = True) -> Path:
    """Compile the library and return its path; the file appears complete.

    Concurrent builds are safe: they write the same file.

    Args:
        directory: Destination; default: the user's cache.
        extra_flags: Additional flags for compiler and linker.
        links_openmp: If False, the library names no OpenMP library and takes the functions from the one that torch has
            loaded. PyPI's torch brings GCC's under a name of its own, and an image may have no other.

    Raises:
        NoLibrary: If there is no compiler, or it fails.
        OSError: If the directory cannot be written.
    """
    command, directory = compiler(), directory or cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".build-") as work:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(work, source.name).with_suffix(".o") for source in sources]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # each thread waits for one compiler process
            done = [
                pool.submit(_run, [*command, *_flags(source), *extra_flags, "-c", str(source), "-o", str(target)])
                for source, target in zip(sources, objects, strict=True)
            ]
            for compiled in done:
                compiled.result()
        made = Path(work, "library.so")
        openmp = ["-fopenmp"] if links_openmp else []
        _run([*command, "-shared", *openmp, *extra_flags, *map(str, objects), "-o", str(made)])
        return made.rename(directory / library_name())


def _flags(source: Path) -> tuple[str, ...]:
    return FLAGS + next((flags for suffix, flags in FLAGS_BY_SUFFIX.items() if source.stem.endswith(suffix)), ())


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NoLibrary(f"{command[0]} took longer than {_COMPILE_SECONDS:.0f} s") from None
    except OSError as error:
        raise NoLibrary(f"cannot run {command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NoLibrary(f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}")
