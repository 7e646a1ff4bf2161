"""The address of the gateway: check that the port is free, probe readiness, and format it as a URL."""

import asyncio
import errno
import socket
from collections.abc import Sequence

PROBE_SECONDS = 2.0
MAX_PORT = 65535


class AddressInUse(RuntimeError):
    """The port is taken, or listening there is not allowed."""


def require_free_port(host: str, port: int) -> None:
    """Raise AddressInUse, with a hint, if the gateway cannot listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the gateway, ignore TIME_WAIT
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"port {port} on {host} is in use; choose another one with --port") from error
        raise AddressInUse(f"cannot listen on {host}, port {port}: {error.strerror}") from error


def require_free_metrics_ports(ports: Sequence[int]) -> None:
    """Raise AddressInUse, with a hint, if a worker cannot listen on its port; 0 is any free port."""
    for worker, port in enumerate(ports):
        if port > MAX_PORT:
            raise AddressInUse(f"port {port} for the metrics of worker-{worker} is over {MAX_PORT}; set --metrics-port")
        try:
            if port:
                require_free_port("127.0.0.1", port)
        except AddressInUse as error:
            raise AddressInUse(
                f"port {port} for the metrics of worker-{worker} is in use; choose others with --metrics-port (0: free "
                "ports), or another --port: the default is --port + 1"
            ) from error


def base_url(host: str, port: int) -> str:
    """Return the URL for clients on this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


async def ready_status(host: str, port: int) -> int | None:
    """Return the status of /readyz for all models, or None if nothing answers.

    The request is written by hand because the command line needs no HTTP library otherwise.
    """
    reachable = base_url(host, port).removeprefix("http://").rsplit(":", 1)[0].strip("[]")
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(reachable, port)
            try:
                writer.write(f"GET /readyz?all=true HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status_line = await reader.readline()
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return None
    match status_line.split():
        case [_version, status, *_reason] if status.isdigit():
            return int(status)
    return None
