"""Replace run-dependent values and error messages, which may be reworded, with placeholders."""

import re
from itertools import count

_ID = re.compile(r"[0-9a-f]{32}")
# ids of Anthropic requests and of tool calls
_SHORT_ID = re.compile(r"(?<=req_)[0-9a-f]{24}|(?<=[\"_])[0-9a-f]{9}(?=\")")
_TIMES = re.compile(r'("(?:created|created_at|completed_at|expires_at)": ?)\d+')
_FINGERPRINT = re.compile(r"\bfp_[0-9a-f]+")
_MESSAGE = re.compile(r'("message": ?)"(?:[^"\\]|\\.)*"')
_ENCRYPTED = re.compile(r'("encrypted_content": ?)"[^"]*"')


def normalized(text: str) -> str:
    """Return `text` with ids numbered by first use, and without times, fingerprints and messages."""
    numbers = count(1)
    known: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        found = match[0]
        if found not in known:
            known[found] = f"<id {next(numbers)}>"
        return known[found]

    text = _ID.sub(numbered, text)
    text = _SHORT_ID.sub(numbered, text)
    text = _TIMES.sub(r"\1<time>", text)
    text = _FINGERPRINT.sub("<fingerprint>", text)
    text = _ENCRYPTED.sub(r'\1"<encrypted>"', text)
    return _MESSAGE.sub(r'\1"<message>"', text)
