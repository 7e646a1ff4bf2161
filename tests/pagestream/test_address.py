"""The gateway's address: whether it is free, whether it is ready, and its URL."""

import asyncio
import socket

import pytest

from pagestream.address import AddressInUse, base_url, ready_status, require_free_metrics_ports, require_free_port


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"), ("example.org", "http://example.org:80"),
    ],
)  # fmt: skip
def test_base_url_of_an_address_is_reachable(host: str, url: str) -> None:
    assert base_url(host, 80) == url


def test_foreign_address_is_named_in_the_error() -> None:
    with pytest.raises(AddressInUse, match=r"cannot listen on 192\.0\.2\.1, port 80"):
        require_free_port("192.0.2.1", 80)


@pytest.mark.parametrize(
    ("line", "status"),
    [(b"HTTP/1.1 200 OK", 200), (b"HTTP/1.1 503 Service Unavailable", 503), (b"SSH-2.0-x", None), (b"", None)],
)
async def test_readiness_is_the_status_of_readyz(line: bytes, status: int | None) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"GET /readyz?all=true HTTP/1.1\r\n"
        writer.write(line + b"\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        assert await ready_status("0.0.0.0", server.sockets[0].getsockname()[1]) == status


async def test_closed_port_has_no_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    assert await ready_status("127.0.0.1", port) is None


def test_busy_metrics_port_names_the_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            AddressInUse, match=rf"port {port} for the metrics of worker-1 is in use.*--metrics-port.*--port"
        ):
            require_free_metrics_ports([0, port])
    require_free_metrics_ports([0, port])
    with pytest.raises(AddressInUse, match="port 65536 for the metrics of worker-0 is over 65535"):
        require_free_metrics_ports([65536])
