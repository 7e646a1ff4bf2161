"""Writes the lock files of this folder from pyproject.toml: `make lock`, with `uv` at hand.

    gateway.txt      the gateway alone (its image): no torch
    engine-cpu.txt   one engine worker on a CPU (its image)
    engine-gpu.txt   the same on CUDA: torch from the package index, with the libraries that it names
    serve.txt        `make serve`: gateway, engine on a CPU, embedded store
    dev.txt          serve.txt and what the tests need
    clients.txt      the clients of tests/clients, from clients.in
    peers/*.txt      one heavy client each (`make peers`), from peers/*.in; *.overrides beside it leaves packages out

Every pin carries its hashes, so that `pip install --require-hashes` takes exactly these files; made for Linux on
x86-64 and Python 3.11. On a CPU torch is the build without CUDA, whose wheel pip must be able to see (in a folder of
wheels, or in PyTorch's own index). Its hash is the only one listed: given the choice, pip would take the one with CUDA.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PYTHON = "3.11"
HEADER = "# Made by `make lock` (requirements/lock.py) from pyproject.toml. Install with pip's --require-hashes.\n"
LOCKS = {
    "gateway.txt": ["--extra", "gateway"],
    "engine-cpu.txt": ["--extra", "engine"],
    "serve.txt": ["--extra", "gateway", "--extra", "engine", "--extra", "embedded"],
}
EVERY_EXTRA = ["gateway", "engine", "embedded", "bench", "tracing"]
DEV = [*(word for extra in EVERY_EXTRA for word in ("--extra", extra)), "--group", "dev"]


def compile_lock(options: list[str], constraints: str = "") -> str:
    """The text of a lock without comments; `constraints` is another lock whose versions are kept."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(constraints)
        file.flush()
        command = ["uv", "pip", "compile", "--quiet", "--python-version", PYTHON, "--generate-hashes", "--no-header"]
        command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--constraint", file.name, *options]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def cpu_lock(options: list[str], constraints: str, wheels: str) -> str:
    return compile_lock(["pyproject.toml", "--find-links", wheels, *options], constraints)


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python requirements/lock.py FOLDER   (a folder with torch's CPU wheel)", file=sys.stderr)
        return 2
    wheels = sys.argv[1]
    kept = _pins(FOLDER / "dev.txt")  # change only what pyproject.toml asks for; delete dev.txt to renew all
    _write("dev.txt", cpu_lock(DEV, kept, wheels))
    pins = _pins(FOLDER / "dev.txt")
    for name, options in LOCKS.items():
        _write(name, cpu_lock(options, pins, wheels))
    others = re.sub(r"^(torch|triton)==.*$", "", pins, flags=re.MULTILINE)  # torch with CUDA names its own triton
    gpu = ["pyproject.toml", "--extra", "engine", "--python-platform", "x86_64-manylinux_2_28"]
    _write("engine-gpu.txt", compile_lock(gpu, others))
    _write("clients.txt", compile_lock(["requirements/clients.in"], _pins(FOLDER / "clients.txt")))
    _write_peers(pins, wheels)
    return 0


def _write_peers(pins: str, wheels: str) -> None:
    torch = "\n".join(re.findall(r"^torch==.*$", pins, re.MULTILINE))
    for source in sorted((FOLDER / "peers").glob("*.in")):
        lock, overrides = source.with_suffix(".txt"), source.with_suffix(".overrides")
        options = [str(source), *(["--override", str(overrides)] if overrides.exists() else [])]
        kept = re.sub(r"^torch==.*$", "", _pins(lock), flags=re.MULTILINE)
        _write(f"peers/{lock.name}", compile_lock([*options, "--find-links", wheels], f"{kept}\n{torch}\n"))


def _pins(lock: Path) -> str:
    if not lock.exists():
        return ""
    return "\n".join(re.findall(r"^([\w.-]+==[^\s\\]+)", lock.read_text(), re.MULTILINE))


def _write(name: str, text: str) -> None:
    (FOLDER / name).write_text(HEADER + text)
    print(f"{name}: {len(re.findall('==', text))} packages")


if __name__ == "__main__":
    sys.exit(main())
