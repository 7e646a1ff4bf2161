"""A worker's KV memory as lines for a terminal: pure text out of one snapshot, with ANSI colours or without.

A cell of the map stands for as many blocks as the screen asks for, and shows the most used state among them.

It serves top.py. It knows no connection and no terminal's size but the one that it is given.
"""

from collections.abc import Iterable, Sequence

from shared.kv_snapshot import KVMove, KVSnapshot

_ORDER = "pfcas"  # by use: the last one in a cell is shown
_CELLS = {"p": " ", "f": "·", "c": "░", "a": "▓", "s": "█"}
_COLOURS = {"c": "36", "a": "34", "s": "35"}  # cyan, blue, magenta; others have none
_MAP_ROWS = 8
_BAR_CELLS = 30


def frame(snapshot: KVSnapshot, moves: Sequence[KVMove], *, columns: int, rows: int, colours: bool) -> list[str]:
    """At most `rows` lines of at most `columns` visible characters. `moves`: the latest ones, newest last."""
    head = [f"{snapshot.worker}  {_bar(snapshot.states)}", f"device  {_counts(snapshot.states, 'active')}"]
    if snapshot.host_states:
        head.append(f"host    {_counts(snapshot.host_states, 'swapped')}")
    painted = [_paint(row) if colours else _draw(row) for row in map_rows(snapshot.states, columns)]
    legend = "  ".join(f"{_CELLS[state]} {name}" for state, name in _NAMES.items())
    table = [f"{'request':<16} {'state':<9} {'tokens':>7} {'blocks':>7} {'host':>6}", *map(str, _requests(snapshot))]
    told = [_move(move) for move in reversed(moves)]
    left = max(0, rows - len(head) - len(painted) - 3)
    body = table[: max(2, left - min(len(told), left // 3))]
    lines = [*(line[:columns] for line in head), "", *painted, legend[:columns], ""]
    return [*lines, *(line[:columns] for line in [*body, *told])][:rows]


_NAMES = {"f": "free", "c": "cached", "a": "active", "s": "shared"}


def map_rows(states: str, columns: int) -> list[str]:
    """The states in rows of cells, most used state of each cell."""
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
        f"\x1b[{_COLOURS[state]}m{_CELLS[state]}\x1b[0m" if state in _COLOURS else _CELLS[state] for state in row
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
