"""`pagestream top [URL]`: the block map of the web page in a terminal, from the same event stream of a gateway.

    --once   print one picture without control characters, for scripts and logs

Workers produce snapshots only while a client reads them. On a small screen a cell of the map
combines several blocks and shows the most used state among them.
"""

import argparse
import os
import shutil
import sys
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from http.client import HTTPResponse
from urllib.error import HTTPError

import msgspec

from shared.kv_snapshot import KVMove, KVSnapshot

SILENCE_SECONDS = 30.0  # workers send every second, and the gateway sends a comment every ten
KEPT_MOVES = 50
_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # alternate screen, hidden cursor
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_ORDER = "pfcas"  # ascending use; a cell shows its highest state
_CELLS = {"p": " ", "f": "·", "c": "░", "a": "▓", "s": "█"}
_COLORS = {"c": "36", "a": "34", "s": "35"}  # cyan, blue, magenta
_MAP_ROWS = 8
_BAR_CELLS = 30
UNAUTHORIZED = 401
_NAMES = {"f": "free", "c": "cached", "a": "active", "s": "shared"}


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(argv)
    try:
        with open_feed(args.url, os.environ.get("PAGESTREAM_API_KEY", "")) as feed:
            show(snapshots(feed), args.worker, once=args.once)
    except KeyboardInterrupt:
        return 0
    except HTTPError as error:
        hint = "; set PAGESTREAM_API_KEY to a key of this server" if error.code == UNAUTHORIZED else ""
        sys.stderr.write(f"pagestream top: {args.url}: {error.code} {error.reason}{hint}\n")
        return 1
    except (OSError, ValueError, msgspec.DecodeError) as error:
        sys.stderr.write(f"pagestream top: {args.url}: {error}\n")
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagestream top",
        description="The KV blocks of a running server.",
        epilog="PAGESTREAM_API_KEY is sent as the API key.",
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="gateway URL (default: %(default)s)")
    parser.add_argument("--worker", default="", metavar="NAME", help="prefix of a worker id (default: first worker)")
    parser.add_argument("--once", action="store_true", help="print one picture and exit")
    return parser


def open_feed(url: str, key: str) -> HTTPResponse:
    request = urllib.request.Request(url.rstrip("/") + "/debug/kv/stream")
    if not request.full_url.startswith(("http://", "https://")):
        raise ValueError("expected http://HOST:PORT")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    response: HTTPResponse = urllib.request.urlopen(request, timeout=SILENCE_SECONDS)
    return response


def snapshots(lines: Iterable[bytes]) -> Iterator[KVSnapshot]:
    """Decode snapshots from Server-Sent Events."""
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
            lines = frame(snapshot, moves, columns=columns, rows=rows - 1, use_colors=live)
            if live:
                sys.stdout.write(_HOME + "".join(line + _CLEAR_LINE + "\n" for line in lines) + _CLEAR_BELOW)
            else:
                sys.stdout.write("\n".join([*lines, ""]))
            sys.stdout.flush()
            if once:
                return
        raise ConnectionError("the gateway closed the stream")
    finally:
        sys.stdout.write(_END if live else "")
        sys.stdout.flush()


def frame(snapshot: KVSnapshot, moves: Sequence[KVMove], *, columns: int, rows: int, use_colors: bool) -> list[str]:
    """Return at most `rows` lines of at most `columns` visible characters; `moves` has the newest last."""
    head = [f"{snapshot.worker}  {_bar(snapshot.states)}", f"device  {_counts(snapshot.states, 'active')}"]
    if snapshot.host_states:
        head.append(f"host    {_counts(snapshot.host_states, 'swapped')}")
    painted = [_paint(row) if use_colors else _draw(row) for row in map_rows(snapshot.states, columns)]
    legend = "  ".join(f"{_CELLS[state]} {name}" for state, name in _NAMES.items())
    table = [f"{'request':<16} {'state':<9} {'tokens':>7} {'blocks':>7} {'host':>6}", *map(str, _requests(snapshot))]
    history = [_move(move) for move in reversed(moves)]
    left = max(0, rows - len(head) - len(painted) - 3)
    body = table[: max(2, left - min(len(history), left // 3))]
    lines = [*(line[:columns] for line in head), "", *painted, legend[:columns], ""]
    return [*lines, *(line[:columns] for line in [*body, *history])][:rows]


def map_rows(states: str, columns: int) -> list[str]:
    """Return rows of cells, each with the most used state among its blocks."""
    blocks_per_cell = max(1, -(-len(states) // (columns * _MAP_ROWS)))
    cells = [
        max(states[first : first + blocks_per_cell], key=_ORDER.index)
        for first in range(0, len(states), blocks_per_cell)
    ]
    return ["".join(cells[first : first + columns]) for first in range(0, len(cells), columns)]


def _draw(row: str) -> str:
    return "".join(_CELLS[state] for state in row)


def _paint(row: str) -> str:
    return "".join(
        f"\x1b[{_COLORS[state]}m{_CELLS[state]}\x1b[0m" if state in _COLORS else _CELLS[state] for state in row
    )


def _bar(states: str) -> str:
    usable = len(states) - states.count("p")
    share = (states.count("a") + states.count("s")) / usable
    filled = round(share * _BAR_CELLS)
    return f"[{'#' * filled}{'.' * (_BAR_CELLS - filled)}] {share:.0%} of {usable} blocks"


def _counts(states: str, used: str) -> str:
    active, shared = states.count("a") + states.count("s"), states.count("s")
    return f"{active} {used} ({shared} shared), {states.count('c')} cached, {states.count('f')} free"


def _requests(snapshot: KVSnapshot) -> Iterable[str]:
    if not snapshot.requests:
        yield "none"
    for request in snapshot.requests:
        figures = f"{request.num_tokens:>7} {len(request.blocks):>7} {len(request.host_blocks):>6}"
        yield f"{request.id:<16} {request.state:<9} {figures}"


def _move(move: KVMove) -> str:
    whose = f" of {move.request_id[:12]}" if move.request_id else ""
    return f"{move.kind.replace('_', ' ')}{whose}: {move.num_blocks} blocks ({move.reason})"
