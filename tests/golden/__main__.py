"""Write the golden files: `python -m tests.golden`. Name the changed lines and the reason in the commit."""

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
