"""`pagestream top`: the picture as text, and the program in a real terminal with a real feed."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from pagestream.top import frame, map_rows
from shared.kv_snapshot import KVMove, KVRequest, KVSnapshot
from tests.patience import PATIENCE_SECONDS

MOVE = KVMove(
    number=1, kind="swap_out", request_id="r" * 32, reason="no block", num_blocks=3, num_bytes=0, num_tokens=9
)
SNAPSHOT = KVSnapshot(
    worker="w.0",
    block_size=16,
    states="p" + "aass" + "c" * 4 + "f" * 8,
    host_states="p" + "a" * 2 + "f" * 3,
    requests=[KVRequest(id="abc#0", state="running", num_tokens=40, num_computed_tokens=39, blocks=[1, 2, 3])],
    events=[MOVE],
)


def test_picture_shows_blocks_and_requests() -> None:
    assert frame(SNAPSHOT, [MOVE], columns=80, rows=24, use_colors=False) == [
        "w.0  [########......................] 25% of 16 blocks",
        "device  4 active (2 shared), 4 cached, 8 free",
        "host    2 swapped (0 shared), 0 cached, 3 free",
        "",
        " ▓▓██░░░░········",
        "· free  ░ cached  ▓ active  █ shared",
        "",
        "request          state      tokens  blocks   host",
        "abc#0            running        40       3      0",
        "swap out of rrrrrrrrrrrr: 3 blocks (no block)",
    ]


def test_picture_fits_every_terminal_size() -> None:
    many = msgspec.structs.replace(SNAPSHOT, states="p" + "f" * 56_000 + "a", requests=SNAPSHOT.requests * 100)
    for columns, rows in ((80, 24), (40, 12), (200, 60), (20, 3)):
        lines = frame(many, [MOVE] * 50, columns=columns, rows=rows, use_colors=False)
        assert len(lines) <= rows and max(map(len, lines)) <= columns


def test_a_cell_of_many_blocks_shows_the_most_used_state() -> None:
    # 32 blocks in 2 columns of 8 rows: two blocks a cell.
    assert map_rows("f" * 14 + "fs" + "ca" * 2 + "c" * 12, 2) == ["ff", "ff", "ff", "fs", "aa", "cc", "cc", "cc"]


def test_colors_appear_only_on_request() -> None:
    assert any("\x1b[34m" in line for line in frame(SNAPSHOT, [], columns=80, rows=24, use_colors=True))
    assert not any("\x1b" in line for line in frame(SNAPSHOT, [], columns=80, rows=24, use_colors=False))


@pytest.fixture
def feed() -> Iterator[str]:
    class Feed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/debug/kv/stream" and self.headers["Authorization"] == "Bearer k"
            self.send_response(200 if known else 401)
            self.end_headers()
            while known:
                self.wfile.write(
                    b": keep-alive\n\ndata: " + json.dumps(msgspec.to_builtins(SNAPSHOT)).encode() + b"\n\n"
                )
                self.wfile.flush()
                time.sleep(0.05)  # interval of the feed, not a wait for an event

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Feed)
    server.daemon_threads = True
    server.handle_error = lambda *arguments: None  # type: ignore[method-assign]  # the client has left
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def command(url: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "pagestream", "top", url, *options]


def test_once_prints_one_picture(feed: str) -> None:
    done = subprocess.run(
        command(feed, "--once"),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PAGESTREAM_API_KEY": "k"},
    )
    assert done.stdout.splitlines()[0].startswith("w.0  [####")
    assert "\x1b" not in done.stdout


def test_missing_key_is_reported(feed: str) -> None:
    done = subprocess.run(command(feed, "--once"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "401 Unauthorized; set PAGESTREAM_API_KEY" in done.stderr


def test_terminal_screen_is_restored(feed: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(feed),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PAGESTREAM_API_KEY": "k"},
        preexec_fn=restore_interrupts,  # noqa: PLW1509 - it sets one signal, and takes no lock
    )
    os.close(theirs)
    shown = read_until(ours, b"abc#0")
    assert shown.startswith(b"\x1b[?1049h") and b"\x1b[34m" in shown
    process.send_signal(signal.SIGINT)
    read_until(ours, b"\x1b[?1049l")
    assert process.wait(PATIENCE_SECONDS) == 0
    os.close(ours)


def restore_interrupts() -> None:
    """Restore SIGINT as in a terminal's program; a shell's background jobs, as tests may be, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(terminal: int, wanted: bytes) -> bytes:
    shown, deadline = b"", time.monotonic() + PATIENCE_SECONDS
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536)
    return shown
