"""Log a line when this process runs out of file descriptors.

libuv then closes new connections at once without an error: clients see a reset, and nothing else is logged.
"""

import errno
import logging
import os
import resource

from shared.ticks import next_tick

CHECK_SECONDS = 1.0

logger = logging.getLogger("gateway")


def has_free_descriptor() -> bool:
    """Return whether one more file can be opened."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return False
    return True


class DescriptorCheck:
    """Logs one line when the last descriptor is taken, and one when there are free ones again."""

    def __init__(self) -> None:
        self._had_free = True

    def check(self) -> None:
        has_free = has_free_descriptor()
        if has_free == self._had_free:
            return
        self._had_free = has_free
        if has_free:
            logger.warning("file descriptors: free again; new connections are accepted")
        else:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error("file descriptors: none left of %d; new connections are closed. Raise `ulimit -n`.", limit)


async def watch_descriptors() -> None:
    """Check once a second."""
    check = DescriptorCheck()
    while True:
        await next_tick(CHECK_SECONDS)
        check.check()
