"""How csrc/ becomes one shared library, once for each state of its sources.

    installed_library()   the file beside the sources (an image has it) or in the user's cache; None before it is built
    build(directory)      compiles; two cores take some seconds

Plain calls of a C++ compiler: the library has a C interface and knows no header of torch or Python, so neither's
version matters to it, and it builds in a tenth of the time of a torch extension. It is used at a start, before the
walks. Knows no kernel.
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
# -ffp-contract=off: product and sum are rounded together only where a source says so, or instruction sets would differ.
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
FLAGS_BY_SUFFIX = {"_avx2": AVX2, "_avx512": AVX512}  # of a source's name
_MACHINES = ("x86_64", "AMD64")
_COMPILE_SECONDS = 300.0  # a file; a tenth of it on a busy machine is much


class NoLibrary(RuntimeError):
    """There is no library for this machine; the message says why, as the end of a sentence."""


def cache_directory() -> Path:
    """The directory for libraries that are built at first use. The same rule as pagestream/directories.py."""
    value = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(value) if os.path.isabs(value) else Path.home() / ".cache"
    return base / "pagestream" / "kernels"


def library_name() -> str:
    """Another one as soon as a source, a flag or the kind of machine is."""
    digest = hashlib.blake2b(repr((FLAGS, FLAGS_BY_SUFFIX, platform.machine())).encode(), digest_size=8)
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(b"%s %d " % (path.name.encode(), path.stat().st_size) + path.read_bytes())
    return f"cpu-{digest.hexdigest()}.so"


def installed_library() -> Path | None:
    name = library_name()
    return next((path for folder in (SOURCES.parent, cache_directory()) if (path := folder / name).is_file()), None)


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, or the first of COMPILERS that is there. Raises NoLibrary."""
    if platform.machine() not in _MACHINES or os.name != "posix":
        raise NoLibrary(f"they are for x86-64 and this machine is {platform.machine()}")
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise NoLibrary(f"there is no C++ compiler ({', '.join(COMPILERS)}): apt-get install g++")
    return [found]


def build(directory: Path | None = None, extra_flags: tuple[str, ...] = ()) -> Path:
    """The library's file in `directory`, which appears there whole. Raises NoLibrary, OSError.

    `directory`: the user's cache unless told. Whoever builds the same at the same time writes the same file.
    """
    command, directory = compiler(), directory or cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".build-") as work:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(work, source.name).with_suffix(".o") for source in sources]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # a thread waits for a compiler's process each
            done = [
                pool.submit(_run, [*command, *_flags(source), *extra_flags, "-c", str(source), "-o", str(target)])
                for source, target in zip(sources, objects, strict=True)
            ]
            for compiled in done:
                compiled.result()
        made = Path(work, "library.so")
        _run([*command, "-shared", "-fopenmp", *extra_flags, *map(str, objects), "-o", str(made)])
        return made.rename(directory / library_name())


def _flags(source: Path) -> tuple[str, ...]:
    return FLAGS + next((flags for suffix, flags in FLAGS_BY_SUFFIX.items() if source.stem.endswith(suffix)), ())


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NoLibrary(f"{command[0]} took longer than {_COMPILE_SECONDS:.0f} s") from None
    except OSError as error:
        raise NoLibrary(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NoLibrary(f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}")
