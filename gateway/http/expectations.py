"""What is answered to `Expect: ...`, which aiohttp answers before any of our middlewares is asked.

aiohttp repeats the header in its 417, and ends in a 500 and a stack trace where its bytes are no UTF-8: with keys too,
and on paths that do not exist. It lets each route have a handler of its own, but not what stands for no route.
"""

from aiohttp import web, web_urldispatcher
from aiohttp.http import HttpVersion11

_UNCHANGED = web_urldispatcher._default_expect_handler


async def _expected(request: web.Request) -> None:
    if request.version == HttpVersion11 and request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: only 100-continue is met.")
    await _UNCHANGED(request)


def meet_expectations() -> None:
    """For all applications of the process."""
    web_urldispatcher._default_expect_handler = _expected
