"""The log line of each request. Errors of one code have at most one line per second: a flood fills no log."""

import logging
import time
from collections.abc import Callable

ERROR_SECONDS = 1.0  # between two lines of one code
_FIRST_ERROR = 400

logger = logging.getLogger("gateway")


class RequestLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._errors: dict[str, tuple[float, int]] = {}  # by code: when one was logged, and how many were not since

    def write(self, method: str, route: str, code: str, seconds: float) -> None:
        """Log a request that has ended, unless an error of its code was logged just now."""
        num_others = 0
        if int(code) >= _FIRST_ERROR:
            now = self._clock()
            logged_at, num_others = self._errors.get(code, (float("-inf"), 0))
            if now - logged_at < ERROR_SECONDS:
                self._errors[code] = (logged_at, num_others + 1)
                return
            self._errors[code] = (now, 0)
        level = logging.INFO if method == "POST" else logging.DEBUG  # DEBUG for probes and scrapes
        extra: dict[str, object] = {"seconds": round(seconds, 3)}
        if num_others:
            extra["others"] = num_others
        logger.log(level, "%s %s %s", method, route, code, extra=extra)
