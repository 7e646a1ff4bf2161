"""Ids of requests without a given one: r0, r1, ... from the start of each test.

The fake model's samples depend on the id, so ids must not depend on the tests that ran before.
"""

from itertools import count

_numbers = count()


def next_request_id() -> str:
    return f"r{next(_numbers)}"


def restart() -> None:
    """Start again with r0. conftest.py calls it before each test."""
    global _numbers  # noqa: PLW0603 - one counter a process, as its tests run one after another
    _numbers = count()
