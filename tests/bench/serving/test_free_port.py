"""No other process gets a free port before its server listens there."""

import errno
import socket

import pytest

from bench.serving.free_port import free_port


def test_a_free_port_is_reserved_for_a_server() -> None:
    port = free_port()
    with socket.socket() as other_call, pytest.raises(OSError) as refusal:
        other_call.bind(("127.0.0.1", port))
    assert refusal.value.errno == errno.EADDRINUSE
    with pytest.raises(ConnectionRefusedError):  # nobody listens there yet
        socket.create_connection(("127.0.0.1", port))
    for host in ("127.0.0.1", ""):
        socket.create_server((host, port)).close()
