"""Build the C++ kernels if needed and print one line that says which implementation is used.

The exit status is 0 with and without a library, because torch's operators are the fallback. `--beside` needs no torch,
so `make` and the image build can run it while torch is being installed.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from kernels.cpu.build import SOURCES, NoLibrary, build, compiler, installed_library


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu")
    parser.add_argument("--check", action="store_true", help="print what would be used; build nothing")
    parser.add_argument(
        "--beside", action="store_true", help="write the library next to its sources instead of the user's cache"
    )
    args = parser.parse_args(argv)
    _, message = look() if args.check else made(SOURCES.parent, str) if args.beside else made(None)
    print(f"C++ kernels: {message}")
    return 0


def look() -> tuple[bool, str]:
    """Return whether the library exists or can be built, and a message about it."""
    try:
        path = installed_library()
        return True, _serving(path) if path else f"to be compiled at the first start, with {' '.join(compiler())}"
    except NoLibrary as error:
        return False, _none(str(error))


def made(directory: Path | None, message_of: Callable[[Path], str] | None = None) -> tuple[bool, str]:
    """Build the library if needed and return as look(); `directory` as in build(), `message_of` formats its path."""
    try:
        return True, (message_of or _serving)(installed_library() or build(directory))
    except NoLibrary as error:
        return False, _none(str(error))
    except OSError as error:
        return False, _none(f"cannot write the library: {error}")


def _serving(path: Path) -> str:
    from kernels.cpu.library import CpuLibrary  # noqa: PLC0415 - imports torch, which a build must not need

    return f"{CpuLibrary(path).instruction_set.name}, {path}"


def _none(why: str) -> str:
    return f"none; falling back to torch operators, which are slower: {why}"


if __name__ == "__main__":
    sys.exit(main())
