"""URLs without a route: their redirect, 404 and 405."""

import pytest
from yarl import URL

from tests.gateway.conftest import Gateway


@pytest.mark.parametrize(
    ("method", "path", "status", "headers"),
    [
        ("GET", "/nothing", 404, {}),
        ("GET", "/nothing%0a/more", 404, {}),
        ("GET", "/v1/completions", 405, {"Allow": "POST"}),
        ("PUT", "/v1/responses/id", 405, {"Allow": "DELETE, GET, HEAD"}),
        ("PUT", "/v1/models/org/model", 405, {"Allow": "GET, HEAD"}),
        ("GET", "//v1///models?a=//b", 308, {"Location": "/v1/models?a=//b"}),
        ("PUT", "//v1/models", 404, {}),
        ("GET", "//nothing", 404, {}),
        ("GET", "//evil.example/v1/models", 404, {}),
    ],
)
async def test_url_without_route_has_its_answer(
    gateway: Gateway, method: str, path: str, status: int, headers: dict[str, str]
) -> None:
    url = URL(f"http://127.0.0.1:{gateway.port}{path}", encoded=True)
    async with gateway.session.request(method, url, allow_redirects=False) as response:
        assert response.status == status
        assert {name: response.headers[name] for name in headers} == headers
    labels = {"route": "unknown", "method": method, "code": str(status)}
    assert gateway.metric("pagestream_http_request_duration_seconds_count", **labels) == 1
