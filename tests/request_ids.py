"""Ids of requests that a test does not name: r0, r1, ..., counted from the start of each test.

The fake model's tokens depend on the id. Without the restart, a test's tokens would depend on how many tests ran
before.
"""

from itertools import count

_numbers = count()


def next_request_id() -> str:
    return f"r{next(_numbers)}"


def restart() -> None:
    """Reset the counter; conftest.py calls this before each test."""
    global _numbers  # noqa: PLW0603 - one counter a process, as its tests run one after another
    _numbers = count()
