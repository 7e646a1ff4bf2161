"""`pagestream top [URL]`: the live page's map in a terminal, from the same feed of a running gateway.

    --once   one picture without control characters, for scripts and logs

The workers make snapshots only while somebody watches: this program is one who does.

It is a client of its own, beside the walk of a block: it knows the feed of the live page alone.
"""

import argparse
import os
import shutil
import sys
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from http.client import HTTPResponse

import msgspec

from pagestream.top_frame import frame
from shared.kv_snapshot import KVMove, KVSnapshot

SILENCE_SECONDS = 30.0  # a worker tells every second, and the gateway sends a comment every ten
KEPT_MOVES = 50
_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # a screen of its own, without a cursor
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="pagestream top", description="The KV blocks of a running server.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="of a gateway (%(default)s)")
    parser.add_argument("--worker", default="", help="whose id begins so; default: the first that is heard")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    args = parser.parse_args(argv)
    try:
        with open_feed(args.url, os.environ.get("PAGESTREAM_API_KEY", "")) as feed:
            show(snapshots(feed), args.worker, once=args.once)
    except KeyboardInterrupt:
        return 0
    except (OSError, ValueError, msgspec.DecodeError) as error:
        sys.stderr.write(f"pagestream top: {args.url}: {error}\n")
        return 1
    return 0


def open_feed(url: str, key: str) -> HTTPResponse:
    request = urllib.request.Request(url.rstrip("/") + "/debug/kv/stream")
    if not request.full_url.startswith(("http://", "https://")):
        raise ValueError("expected http://HOST:PORT")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    response: HTTPResponse = urllib.request.urlopen(request, timeout=SILENCE_SECONDS)
    return response


def snapshots(lines: Iterable[bytes]) -> Iterator[KVSnapshot]:
    """Out of Server-Sent Events."""
    for line in lines:
        if line.startswith(b"data: "):
            yield msgspec.json.decode(line.removeprefix(b"data: "), type=KVSnapshot)


def show(feed: Iterable[KVSnapshot], worker: str, *, once: bool) -> None:
    moves: deque[KVMove] = deque(maxlen=KEPT_MOVES)
    live = sys.stdout.isatty() and not once
    try:
        sys.stdout.write(_BEGIN if live else "")
        for snapshot in feed:
            worker = worker or snapshot.worker
            if not snapshot.worker.startswith(worker):
                continue
            moves.extend(snapshot.events)
            columns, rows = shutil.get_terminal_size()
            lines = frame(snapshot, moves, columns=columns, rows=rows - 1, colours=live)
            if live:
                sys.stdout.write(_HOME + "".join(line + _CLEAR_LINE + "\n" for line in lines) + _CLEAR_BELOW)
            else:
                sys.stdout.write("\n".join([*lines, ""]))
            sys.stdout.flush()
            if once:
                return
        raise ConnectionError("the gateway ended the feed")
    finally:
        sys.stdout.write(_END if live else "")
        sys.stdout.flush()
