"""Files and batches. Served if the gateway has a directory for them."""

from collections.abc import AsyncIterator, Callable

from aiohttp import web

from gateway.apis.files import batches, files
from gateway.apis.files.directory import FILES, FilesDirectory
from gateway.http.state import STATE
from gateway.pipeline.api import Api
from gateway.process import owner_task


def _start(app: web.Application) -> Callable[[web.Application], AsyncIterator[None]]:
    directory = app[FILES] = FilesDirectory(app[STATE].settings, app[STATE].metrics)
    return owner_task("files_upkeep", directory.run, directory.close)


API = Api(
    operations=(*files.OPERATIONS, *batches.OPERATIONS),
    is_served=lambda settings: settings.files_dir is not None,
    start=_start,
)
