"""Which batch gives way to another owner's when a gateway drives as many as it may. Pure.

Beside the walks: service.py asks it. It knows owners and times, and nothing of what a batch holds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

TURN_SECONDS = 60.0  # what a batch has for itself while owners without any wait: some hundred lines at least


@dataclass(frozen=True, slots=True)
class Turn:
    batch_id: str
    owner: str
    began_at: float  # on the clock of `now`


def num_of(owner: str, turns: Sequence[Turn]) -> int:
    return sum(turn.owner == owner for turn in turns)


def who_gives_way(turns: Sequence[Turn], owner: str, now: float) -> Turn | None:
    """To a batch of `owner`, so that in the end all owners have equally many. None: nobody has to, now.

    The latest of who has more than one more than `owner`. Where each has one and `owner` none, the one that has had its
    turn the longest, once that was long enough.
    """
    counts = Counter(turn.owner for turn in turns)
    richest, most = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if most > counts[owner] + 1:
        return max((turn for turn in turns if turn.owner == richest), key=lambda turn: turn.began_at)
    if counts[owner]:
        return None
    oldest = min(turns, key=lambda turn: turn.began_at, default=None)
    return oldest if oldest is not None and now - oldest.began_at >= TURN_SECONDS else None
