"""A free port of 127.0.0.1 for a server that is started next."""

import atexit
import secrets
import socket

FIRST_PORT, NUM_PORTS = 10_000, 22_000


def free_port() -> int:
    """Return a port below the kernel's ephemeral range, so that no connection can take it before the server listens.

    No other call in any process returns it while this process lives: a socket without SO_REUSEADDR cannot be bound to
    a port that has a bound socket, whereas servers, which set it, can (Linux, `inet_csk_bind_conflict`).
    """
    while True:
        reservation = socket.socket()
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        try:
            reservation.bind(("127.0.0.1", port))
        except OSError:
            reservation.close()
            continue
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        atexit.register(reservation.close)
        return port
