"""python -m kernels.cpu [--check] [--beside]: build the library unless it is there, and say in one line what serves.

Exit status 0 with and without a library: torch's operators serve where there is none. --check only looks; --beside
writes it beside the sources, for a clone or an image, and needs no torch, which may be installed meanwhile. Beside the
walks: make and the image's build run it, before any worker starts. It knows no kernel by its name.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from kernels.cpu.build import SOURCES, NoLibrary, build, compiler, installed_library


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu")
    parser.add_argument("--check", action="store_true", help="look only: build nothing")
    parser.add_argument("--beside", action="store_true", help="build beside the sources, not in the cache")
    args = parser.parse_args(argv)
    _, told = look() if args.check else made(SOURCES.parent, str) if args.beside else made(None)
    print(f"C++ kernels: {told}")
    return 0


def look() -> tuple[bool, str]:
    """Whether the library is there or can be built, and what is to be told of it."""
    try:
        path = installed_library()
        return True, _serving(path) if path else f"to be compiled at the first start, with {' '.join(compiler())}"
    except NoLibrary as error:
        return False, _none(str(error))


def made(directory: Path | None, told: Callable[[Path], str] | None = None) -> tuple[bool, str]:
    """As look(), once it is built. `directory`: see build(); `told`: what to tell of the file."""
    try:
        return True, (told or _serving)(installed_library() or build(directory))
    except NoLibrary as error:
        return False, _none(str(error))
    except OSError as error:
        return False, _none(f"the library cannot be written: {error}")


def _serving(path: Path) -> str:
    from kernels.cpu.library import CpuLibrary  # noqa: PLC0415 - imports torch, without which a build must do

    return f"{CpuLibrary(path).instruction_set.name}, {path}"


def _none(why: str) -> str:
    return f"none, torch's operators serve, slower: {why}"


if __name__ == "__main__":
    sys.exit(main())
