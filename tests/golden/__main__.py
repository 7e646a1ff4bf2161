"""python -m tests.golden: write the golden files anew. Say in the commit which lines changed, and why."""

import asyncio
import tempfile
from pathlib import Path

from tests.golden.recording import MAX_MODEL_LEN, recorded
from tests.tiny_model import write_tiny_model

FILES = Path(__file__).parent / "files"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        files = asyncio.run(recorded(write_tiny_model(Path(directory) / "tiny", MAX_MODEL_LEN)))
    for old in FILES.glob("*.txt"):
        old.unlink()
    for name, text in files.items():
        (FILES / name).write_text(text)


if __name__ == "__main__":
    main()
