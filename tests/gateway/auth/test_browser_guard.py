"""Without API keys, the gateway serves programs but refuses requests from web pages of other sites."""

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from gateway.auth.access import check_host, check_site
from gateway.errors import Forbidden
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says

PROMPT = {"prompt": "hi", "max_tokens": 2}
KEY = "ps-0123456789abcdef"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]:8000", "10.1.2.3", "gateway:8000", "app.localhost:8000",
     "localhost.", "llm.example.com:443", ""],
)  # fmt: skip
def test_host_that_nobody_can_register_is_accepted(host: str) -> None:
    check_host({"Host": host}, frozenset({"llm.example.com"}))


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.io", "a.b", "[::1", "1.2.3.4.5"],
)  # fmt: skip
def test_host_that_somebody_can_register_is_refused(host: str) -> None:
    with pytest.raises(Forbidden, match="--allowed-hosts"):
        check_host({"Host": host}, frozenset({"llm.example.com"}))


HERE = {"Host": "127.0.0.1:8000"}
NAVIGATES = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {}),  # curl and the SDKs
        ("POST", {"Origin": "http://127.0.0.1:8000"}),  # our page, in an old browser
        ("POST", {"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}),
        ("GET", {"Sec-Fetch-Site": "none"}),
        ("GET", NAVIGATES),
    ],
)
def test_programs_and_own_page_are_accepted(method: str, headers: dict[str, str]) -> None:
    check_site(method, HERE | headers)


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {"Origin": "http://["}),  # invalid URL
        ("POST", {"Sec-Fetch-Site": "cross-site"}),
        ("POST", {"Sec-Fetch-Site": "same-site"}),  # another port of this machine
        ("GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}),
        ("GET", NAVIGATES | {"Sec-Fetch-Dest": "iframe"}),
        ("POST", NAVIGATES),  # a form
        ("POST", {"Origin": "http://evil.example"}),
        ("POST", {"Origin": "http://127.0.0.1:3000"}),
        ("POST", {"Origin": "null"}),
        ("POST", {"Origin": "http://evil.example", "Sec-Fetch-Site": "unheard-of"}),
    ],
)
def test_cross_site_request_is_refused(method: str, headers: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        check_site(method, HERE | headers)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "host_not_allowed"),
        ({"Origin": "http://evil.example"}, "cross_site_request"),
        ({"Sec-Fetch-Site": "cross-site"}, "cross_site_request"),
    ],
)
async def test_every_route_except_probes_is_guarded(gateway: Gateway, headers: dict[str, str], code: str) -> None:
    for method, path in [*gateway.routes, ("POST", "/nowhere")]:
        url = path.replace("{id}", "x").replace("{id:.+}", "x")
        async with gateway.session.request(method, url, json=PROMPT, headers=headers) as response:
            if path in ("/livez", "/readyz"):
                assert response.status == 200
            else:
                assert response.status == 403, f"{method} {path}"
                if method != "HEAD":
                    body = await response.json()
                    if path.startswith("/api/"):  # Ollama's form: a text beside its code
                        assert isinstance(body["error"], str) and body["code"] == code
                    else:
                        assert (body["error"]["code"], body["error"]["type"]) == (code, "permission_error")
    assert gateway.engine.requests == []


async def test_body_without_content_type_needs_no_origin(gateway: Gateway) -> None:
    """Accept a body without Content-Type only from programs.

    A page can send one without a CORS preflight, but it cannot omit its Origin.
    """
    gateway.engine.script = says([5])
    data = b'{"prompt":"hi","max_tokens":2}'
    for headers, status in (({}, 200), ({"Origin": "http://evil.example"}, 403)):
        async with gateway.session.post(
            "/v1/completions", data=data, headers=headers, skip_auto_headers=["Content-Type"]
        ) as response:
            assert response.status == status
    # these types need no CORS preflight
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"Content-Type": content_type}
        async with gateway.session.post("/v1/completions", data=data, headers=headers) as response:
            assert response.status == 415
    async with gateway.session.options("/v1/completions", headers={"Access-Control-Request-Method": "POST"}) as asked:
        assert asked.status == 405
        assert not [name for name in asked.headers if name.lower().startswith("access-control")]


async def test_request_with_key_skips_host_and_site_checks(start_gateway: Callable[..., Any]) -> None:
    gateway: Gateway = await start_gateway(api_key=KEY)
    gateway.engine.script = says([5])
    headers = {"Host": "llm.example.com", "Origin": "http://app.example.com", "Authorization": f"Bearer {KEY}"}
    async with gateway.session.post("/v1/completions", json=PROMPT, headers=headers) as response:
        assert response.status == 200


async def test_allowed_hosts_adds_a_host(start_gateway: Callable[..., Any]) -> None:
    gateway: Gateway = await start_gateway(allowed_hosts=("LLM.example.com",))
    async with gateway.session.get("/v1/models", headers={"Host": "llm.example.com"}) as response:
        assert response.status == 200


async def test_http_1_0_request_without_host_is_served(gateway: Gateway) -> None:
    async with aiohttp.ClientSession(version=aiohttp.HttpVersion10) as session:
        url = f"http://127.0.0.1:{gateway.port}/v1/models"
        async with session.get(url, skip_auto_headers=["Host"]) as response:
            assert response.status == 200
