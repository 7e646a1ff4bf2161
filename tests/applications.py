"""Applications that have ended are kept by aiohttp: a process of tests makes hundreds, one of the product just one.

Knows no test; conftest.py forgets them behind each.
"""

import sys


def forget_applications() -> None:
    """Let go of the applications of the last 1,024 handlers that were called in this process.

    Each is a gateway with its model, and a large circle: 700 of them hold 600 MB, through which every search for
    garbage goes; and the one that makes room for a new handler becomes garbage in the middle of another's test.
    """
    if (web_app := sys.modules.get("aiohttp.web_app")) is not None:
        web_app._cached_build_middleware.cache_clear()
