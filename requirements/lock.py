"""Write the lock files of this folder from pyproject.toml: `make lock`, which needs `uv`.

    gateway.txt      the gateway (its image), without torch
    engine-cpu.txt   one engine worker on a CPU (its image)
    engine-gpu.txt   the same on CUDA: torch from the package index, with its libraries
    serve.txt        `make serve`: gateway, engine on a CPU, embedded store
    dev.txt          serve.txt and the packages of the tests
    clients.txt      the clients of tests/clients, from clients.in
    peers/*.txt      one large client each (`make peers`), from peers/*.in; *.overrides leaves packages out

Every pin has hashes, so `pip install --require-hashes` installs exactly these files. They are for Linux on x86-64 and
Python 3.11, and are checked for 3.12. On a CPU torch is the build without CUDA, whose wheel pip must find in a folder
or in PyTorch's index. Only hashes of that build are listed, because pip would prefer the one with CUDA. On a GPU torch
and Triton are the versions of the figures in docs/benchmarks.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PYTHON, PYTHON_TOO = "3.11", "3.12"
# Hashes of torch's manylinux x86-64 wheels without CUDA, one per Python, because a folder of wheels seldom has both.
TORCH_CPU_HASHES = {
    "2.13.0+cpu": {
        "3.11": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "3.12": "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
    }
}
MEASURED_ON_GPU = "torch==2.11.0\ntriton==3.6.0\n"
HEADER = "# Made by `make lock` (requirements/lock.py) from pyproject.toml. Install with pip's --require-hashes.\n"
LOCKS = {
    "gateway.txt": ["--extra", "gateway"],
    "engine-cpu.txt": ["--extra", "engine"],
    "serve.txt": ["--extra", "gateway", "--extra", "engine", "--extra", "embedded"],
}
EVERY_EXTRA = ["gateway", "engine", "cuda", "embedded", "bench", "tracing"]
DEV = [*(word for extra in EVERY_EXTRA for word in ("--extra", extra)), "--group", "dev"]


def compile_lock(options: list[str], constraints: str = "", python: str = PYTHON) -> str:
    """Return the text of a lock without comments. `constraints` is another lock whose versions are kept."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(constraints)
        file.flush()
        command = ["uv", "pip", "compile", "--quiet", "--python-version", python, "--generate-hashes", "--no-header"]
        command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--constraint", file.name, *options]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def cpu_lock(options: list[str], constraints: str, wheels: str) -> str:
    locked = with_torch_of_each_python(compile_lock(["pyproject.toml", "--find-links", wheels, *options], constraints))
    hold_for_the_other_python(["pyproject.toml", *options], locked)
    return locked


def with_torch_of_each_python(lock: str) -> str:
    """Return the lock with all hashes of TORCH_CPU_HASHES instead of those that uv found."""

    def listed(match: re.Match[str]) -> str:
        if match[1] not in TORCH_CPU_HASHES:
            raise SystemExit(f"torch {match[1]}: TORCH_CPU_HASHES in {Path(__file__).name} must have its hashes")
        hashes = TORCH_CPU_HASHES[match[1]].values()
        return f"torch=={match[1]} \\\n" + " \\\n".join(f"    --hash=sha256:{value}" for value in hashes) + "\n"

    return re.sub(r"torch==(\S+\+cpu) \\\n(?: +--hash=\S+(?: \\)?\n)+", listed, lock)


def hold_for_the_other_python(options: list[str], lock: str) -> None:
    """Exit if Python 3.12 needs other packages. torch is ignored, because its wheel for 3.12 may be missing."""
    pins = "\n".join(re.findall(r"^([\w.-]+==[^\s\\]+)", re.sub(r"(?m)^torch==.*$", "", lock), re.MULTILINE))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"torch; python_version < '{PYTHON_TOO}'\n")
        file.flush()
        needed = compile_lock([*options, "--override", file.name], pins, PYTHON_TOO)
    if lacking := set(re.findall(r"^([\w.-]+==[^\s\\]+)", needed, re.MULTILINE)) - set(pins.splitlines()):
        raise SystemExit(f"Python {PYTHON_TOO} needs additional packages: {', '.join(sorted(lacking))}")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python requirements/lock.py PATH   (folder with torch's CPU wheel)", file=sys.stderr)
        return 2
    wheels = sys.argv[1]
    kept = _pins(FOLDER / "dev.txt")  # changes only what pyproject.toml requires; delete dev.txt to update all
    _write("dev.txt", cpu_lock(DEV, kept, wheels))
    pins = _pins(FOLDER / "dev.txt")
    for name, options in LOCKS.items():
        _write(name, cpu_lock(options, pins, wheels))
    others = re.sub(r"^(torch|triton|setuptools)==.*$", "", pins, flags=re.MULTILINE)  # torch needs an older one
    gpu = ["pyproject.toml", "--extra", "engine", "--extra", "cuda", "--python-platform", "x86_64-manylinux_2_28"]
    _write("engine-gpu.txt", compile_lock(gpu, others + "\n" + MEASURED_ON_GPU))
    _write("clients.txt", compile_lock(["requirements/clients.in"], _pins(FOLDER / "clients.txt")))
    _write_peers(pins, wheels)
    return 0


def _write_peers(pins: str, wheels: str) -> None:
    torch = "\n".join(re.findall(r"^torch==.*$", pins, re.MULTILINE))
    for source in sorted((FOLDER / "peers").glob("*.in")):
        lock, overrides = source.with_suffix(".txt"), source.with_suffix(".overrides")
        options = [str(source), *(["--override", str(overrides)] if overrides.exists() else [])]
        kept = re.sub(r"^torch==.*$", "", _pins(lock), flags=re.MULTILINE)
        locked = compile_lock([*options, "--find-links", wheels], f"{kept}\n{torch}\n")
        _write(f"peers/{lock.name}", with_torch_of_each_python(locked))


def _pins(lock: Path) -> str:
    if not lock.exists():
        return ""
    return "\n".join(re.findall(r"^([\w.-]+==[^\s\\]+)", lock.read_text(), re.MULTILINE))


def _write(name: str, text: str) -> None:
    (FOLDER / name).write_text(HEADER + text)
    print(f"{name}: {len(re.findall('==', text))} packages")


if __name__ == "__main__":
    sys.exit(main())
