"""A port of 127.0.0.1 for a server that is started next. Knows no server."""

import contextlib
import secrets
import socket

FIRST_PORT, NUM_PORTS = 10_000, 22_000


def free_port() -> int:
    """Below those that the kernel gives to connections: until a server listens there, none of them can take it."""
    while True:
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
