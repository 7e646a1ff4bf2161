"""The directory of --files-dir at this gateway: its storage, and the upkeep of what it holds."""

import logging
import math
import time

from aiohttp import web

from gateway.batches.storage.disk import to_the_end
from gateway.batches.storage.quota import Quota
from gateway.batches.storage.storage import Storage
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from shared.ticks import next_tick

logger = logging.getLogger("gateway")

MEASURE_SECONDS = 5.0
TIDY_SECONDS = 60.0


class FilesDirectory:
    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        """Open the storage; raise OSError."""
        assert settings.files_dir is not None
        quota = Quota(settings.max_files_bytes, settings.max_files_bytes_per_key)
        self.storage = Storage(settings.files_dir, quota, int(settings.files_retention_seconds))
        self.max_file_bytes = settings.max_file_bytes
        self._metrics = metrics
        self._tidied_at = -math.inf
        metrics.files_limit.set(settings.max_files_bytes)

    async def run(self) -> None:
        """Measure the use, and delete what has expired or was abandoned, until cancelled."""
        while True:
            try:
                self._metrics.files_bytes.set(await to_the_end(self.storage.used_bytes))
                self._metrics.open_batches.set(await to_the_end(self.storage.num_open_batches))
                if time.monotonic() - self._tidied_at >= TIDY_SECONDS:
                    self._tidied_at = time.monotonic()
                    await to_the_end(self.storage.tidy)
            except OSError as error:
                logger.error("files directory: upkeep failed: %s", error)
            await next_tick(MEASURE_SECONDS)

    def close(self) -> None:
        """Close the storage, after run() has ended."""
        self.storage.close()


FILES = web.AppKey("FILES", FilesDirectory)
