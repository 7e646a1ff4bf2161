"""Parse the media type of a request according to RFC 9110."""

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.errors import UnsupportedMediaType
from gateway.http.media_type import MAX_CHARS, charset_of, media_type_of

NONE = "application/octet-stream"


@pytest.mark.parametrize(
    ("header", "media_type", "charset"),
    [
        ("application/json", "application/json", "utf-8"),
        ("Application/JSON; Charset=Latin-1", "application/json", "latin-1"),
        (' application/vnd.api+json ;x=1; charset="UTF-8"', "application/vnd.api+json", "utf-8"),
        ("application/json;charset='utf-8'", "application/json", "utf-8"),
        ("application/json;charset=", "application/json", "utf-8"),
        ("multipart/form-data; boundary=a", "multipart/form-data", "utf-8"),
        ("application/json, text/plain", NONE, "utf-8"),
        ("application/json charset=latin-1", NONE, "utf-8"),
        ("application / json", NONE, "utf-8"),
        ("/json", NONE, "utf-8"),
        ("", NONE, "utf-8"),
        (";" * MAX_CHARS, NONE, "utf-8"),
    ],
)
def test_media_type_is_read_without_parameters(header: str, media_type: str, charset: str) -> None:
    request = make_mocked_request("POST", "/", headers={"Content-Type": header})
    assert (media_type_of(request), charset_of(request)) == (media_type, charset)


def test_long_media_type_is_not_read() -> None:
    request = make_mocked_request("POST", "/", headers={"Content-Type": "application/json;" + "x" * MAX_CHARS})
    for read in (media_type_of, charset_of):
        with pytest.raises(UnsupportedMediaType):
            read(request)
