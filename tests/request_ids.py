"""Ids of requests that a test does not name: r0, r1, ... whatever ran before it in the process.

What the fake model samples follows from the id, so a test that got the ids that were left would see other tokens, and
now and then the end of an answer, by how many tests ran before it.
"""

from itertools import count

_numbers = count()


def next_request_id() -> str:
    return f"r{next(_numbers)}"


def restart() -> None:
    """Called before each test (conftest.py)."""
    global _numbers  # noqa: PLW0603 - one counter a process, as its tests run one after another
    _numbers = count()
