"""Free the aiohttp applications of finished tests, which aiohttp caches.

A test process makes hundreds of applications, the product one. conftest.py calls this after each test.
"""

import sys


def forget_applications() -> None:
    """Clear aiohttp's caches of the last 1,024 handlers.

    Each handler holds its gateway and model: 700 of them hold 600 MB, which every garbage collection traverses.
    """
    if (web_app := sys.modules.get("aiohttp.web_app")) is not None:
        web_app._cached_build_middleware.cache_clear()
