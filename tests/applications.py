"""Release aiohttp applications after each test. aiohttp caches them, and a test process creates hundreds."""

import sys


def forget_applications() -> None:
    """Release the applications of the last 1,024 handlers that were called in this process.

    Each is a gateway with its model and has reference cycles. 700 of them hold 600 MB, which every garbage collection
    visits, and one that is evicted from the cache would become garbage during another test.
    """
    if (web_app := sys.modules.get("aiohttp.web_app")) is not None:
        web_app._cached_build_middleware.cache_clear()
