"""Extract Wikipedia articles as plain prose, run by the Python of `.venv/peers/quality`; one JSON line each.

    python articles_peer.py DUMP OUT --num-words 20000

DUMP is a pages-articles file, .xml.bz2. Only paragraphs that consist of sentences are kept, without tables, lists,
headings and markup.
"""

import argparse
import bz2
import json
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import mwparserfromhell

MIN_WORDS = 40  # per paragraph, which excludes captions and headings; ten times that per article
_PAGE = "{http://www.mediawiki.org/xml/export-0.10/}"
MAX_WORDS = 1500  # per article, for variety
_REFERENCE = re.compile(r"<ref[^>/]*/>|<ref.*?</ref>|<!--.*?-->", re.DOTALL)
_MARK_UP = re.compile(r"[|{}<>=\[\]*#_\\]|thumb|''|^[:;!]|\(\s*[,;)]|\s[,.;]")


def articles(dump: Path) -> Iterator[tuple[str, str]]:
    """Yield titles and texts in the order of the dump."""
    with bz2.open(dump) as file:
        for _, page in ElementTree.iterparse(file):
            if page.tag != f"{_PAGE}page":
                continue
            title, text = page.findtext(f"{_PAGE}title"), page.findtext(f"{_PAGE}revision/{_PAGE}text")
            if page.findtext(f"{_PAGE}ns") == "0" and page.find(f"{_PAGE}redirect") is None and title and text:
                yield title, text
            page.clear()


def prose(wikitext: str) -> str:
    plain = mwparserfromhell.parse(_REFERENCE.sub("", wikitext)).strip_code()
    kept, words = [], 0
    for line in (" ".join(line.split()) for line in plain.splitlines()):
        if is_prose(line) and words < MAX_WORDS:
            kept.append(line)
            words += len(line.split())
    return "\n\n".join(kept)


def is_prose(line: str) -> bool:
    return len(line.split()) >= MIN_WORDS and line.endswith((".", '."')) and _MARK_UP.search(line) is None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dump", metavar="PATH", type=Path)
    parser.add_argument("out", metavar="PATH", type=Path)
    parser.add_argument("--num-words", metavar="N", type=int, required=True)
    options = parser.parse_args()
    words = 0
    with options.out.open("w") as file:
        for title, wikitext in articles(options.dump):
            text = prose(wikitext)
            if len(text.split()) < 10 * MIN_WORDS:
                continue
            file.write(json.dumps({"title": title, "text": text}) + "\n")
            words += len(text.split())
            if words >= options.num_words:
                return
    raise SystemExit(f"{options.dump} has only {words} words of prose; --num-words is {options.num_words}")


if __name__ == "__main__":
    main()
