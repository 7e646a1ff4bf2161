"""The HTTP server's own logger: what strangers send that is no HTTP is not logged.

aiohttp writes a traceback at ERROR for each, with the bytes that it could not read: a key, perhaps.
"""

import logging

from aiohttp.http_exceptions import HttpProcessingError


class _NoHttp(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def server_logger() -> logging.Logger:
    logger = logging.getLogger("gateway.http")
    if not logger.filters:
        logger.addFilter(_NoHttp())
    return logger
