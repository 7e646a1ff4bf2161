"""Events of block moves (preemptions, swaps, evictions, copies) in a bounded ring, and their totals.

An event names the request, the reason, the blocks and tokens, and, once the executor has measured it, the transfer
time. GET /debug/kv/events returns them. The clocks are arguments.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

from engine_worker.kv.kv_durations import KVDurations

RING_EVENTS = 4_096  # about 1 MiB; a worker short of blocks fills it in minutes


class KVEventKind(StrEnum):
    SWAP_OUT = "swap_out"  # a running sequence yields; its KV goes to host memory
    RECOMPUTE = "recompute"  # a running sequence yields; its KV is computed again later
    SWAP_IN = "swap_in"  # a swapped sequence returns to the device
    EVICT = "evict"  # the prefix cache loses unused blocks; `reason`: dropped, or kept on the host
    FETCH = "fetch"  # a prefix returns from host memory
    COPY = "copy"  # blocks are copied on the device before a sequence writes to them


@dataclass(slots=True)
class KVEvent:
    number: int  # counts from 1
    step: int
    time_seconds: float
    kind: KVEventKind
    request_id: str  # "" for evictions, whose blocks no request used
    reason: str
    num_blocks: int  # moved, copied, or dropped
    num_bytes: int
    num_tokens: int  # affected tokens of the sequence
    milliseconds: float | None = None  # of all transfers of the step in this direction; None: not measured yet


@dataclass(slots=True)
class KVTotals:
    """Counts since the worker started, in blocks, preemptions, or tokens, as named."""

    swap_preemptions: int = 0
    recompute_preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    offloaded_blocks: int = 0  # evicted prefixes copied to the host
    fetched_blocks: int = 0  # prefixes copied back
    copied_blocks: int = 0
    evicted_blocks: int = 0  # on the device
    evicted_host_blocks: int = 0
    cached_prompt_tokens: int = 0  # found when their request was first admitted
    queried_tokens: int = 0  # looked up in the prefix cache, at each admission
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    stored_states: int = 0  # recurrent states copied to host memory
    fetched_states: int = 0
    hit_tokens_lost_for_state: int = 0  # their KV was cached, and the recurrent state after them was not


class KVEventLog:
    def __init__(
        self,
        block_bytes: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        durations: KVDurations | None = None,
    ) -> None:
        """Create the log. `clock`: seconds since 1970."""
        self._block_bytes = block_bytes
        self._clock = clock
        self._events: deque[KVEvent] = deque(maxlen=RING_EVENTS)
        self._num_recorded = 0
        self.totals = KVTotals()
        self.durations = durations or KVDurations()

    def record(
        self, kind: KVEventKind, step: int, *, request_id: str = "", reason: str, num_blocks: int, num_tokens: int
    ) -> None:
        self._num_recorded += 1
        num_bytes = num_blocks * self._block_bytes
        now = self._clock()
        event = KVEvent(self._num_recorded, step, now, kind, request_id, reason, num_blocks, num_bytes, num_tokens)
        self._events.append(event)

    def measured(self, step: int, swap_out_seconds: float, swap_in_seconds: float) -> None:
        """Record the transfer times of the batch of `step`; 0: no transfer in that direction."""
        if swap_out_seconds:
            self.durations.swap_out.add(swap_out_seconds)
        if swap_in_seconds:
            self.durations.swap_in.add(swap_in_seconds)
        for event in reversed(self._events):
            if event.step < step:
                return
            if event.step == step and event.kind in _OUT:
                event.milliseconds = swap_out_seconds * 1e3
            elif event.step == step and event.kind in _IN:
                event.milliseconds = swap_in_seconds * 1e3

    def totals_as_dict(self) -> dict[str, float]:
        return asdict(self.totals)

    def since(self, number: int, limit: int = RING_EVENTS) -> dict[str, Any]:
        """Return the events after `number`, oldest first, and how many of them have left the ring (`num_lost`)."""
        oldest = self._events[0].number if self._events else self._num_recorded + 1
        first = max(0, number + 1 - oldest)
        events: Iterable[KVEvent] = islice(self._events, first, first + limit)
        found = [asdict(event) for event in events]
        num_lost = max(0, oldest - number - 1)
        return {"events": found, "last": found[-1]["number"] if found else number, "num_lost": num_lost}


_OUT = frozenset({KVEventKind.SWAP_OUT, KVEventKind.EVICT})
_IN = frozenset({KVEventKind.SWAP_IN, KVEventKind.FETCH})
