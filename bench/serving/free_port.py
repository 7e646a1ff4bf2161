"""A free port of 127.0.0.1 for a server that is started next."""

import contextlib
import secrets
import socket

FIRST_PORT, NUM_PORTS = 10_000, 22_000


def free_port() -> int:
    """Return a port below the kernel's ephemeral range, so that no connection can take it before the server listens."""
    while True:
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
