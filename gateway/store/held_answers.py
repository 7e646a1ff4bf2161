"""Kept answers that this gateway makes or reads: while one goes on, its name and the parts that have ended live on.

Each of them would expire at a time of its own; prolonged until the end of the last part and once more then, an answer
and its name can be had for KEEP_SECONDS after its end, and not longer.

After the end of a kept answer's way back: inference_client.py has it say PROLONG to the store, from time to time. It
knows nothing of what an answer says, or of who asks for it.
"""

import time
from collections.abc import Callable, Sequence

from gateway.store.response_stream import ResponseStream
from shared.new_requests import KEEP_SECONDS, PROLONG_SECONDS
from shared.redis_scripts import RedisScripts


class HeldAnswers:
    def __init__(self, scripts: RedisScripts, clock: Callable[[], float] = time.monotonic) -> None:
        self._scripts = scripts
        self._clock = clock
        self._open: list[Sequence[ResponseStream]] = []
        self._prolonged_at = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, parts: Sequence[ResponseStream]) -> None:
        """One answer's parts; passed over if it has ended, or if nothing of it can expire before its end."""
        keep = parts[0].keep
        if keep is not None and (keep.name or len(parts) > 1) and not all(part.had_ended for part in parts):
            self._open.append(parts)

    def clear(self) -> None:
        """They go on without this gateway, for as long as they were last prolonged."""
        self._open.clear()

    async def prolong(self) -> None:
        """Answers that have ended here are prolonged at once, others every PROLONG_SECONDS. May raise the store's
        errors, and be repeated."""
        now = self._clock()
        is_due = now - self._prolonged_at >= PROLONG_SECONDS
        for parts in list(self._open):
            is_over = all(part.has_ended for part in parts)
            if is_over or is_due:
                await self._prolong(parts, is_over=is_over)
        if is_due:
            self._prolonged_at = now

    async def _prolong(self, parts: Sequence[ResponseStream], *, is_over: bool) -> None:
        keep = parts[0].keep
        assert keep is not None
        name_seconds = KEEP_SECONDS if is_over else keep.name_seconds
        await self._scripts.prolong([part.request_id for part in parts], keep.name, name_seconds)
        if is_over and parts in self._open:
            self._open.remove(parts)
