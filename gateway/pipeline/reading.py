"""Reads an answer to its end, within its key's time slices of the event loop.

    await Reading(generation, sink).to_end()

The task that receives events also passes them to the sink, because waking a task per answer took 6 us per token. The
caller of to_end() only waits for the end, for an error, or for a sink that does not keep up.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from gateway.pipeline.choice_progress import ChoiceUpdate
from gateway.work.loop_scheduler import KeyScheduler


class Readable(Protocol):
    """The part of Generation that Reading uses."""

    @property
    def scheduler(self) -> KeyScheduler: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def read_plain(self) -> Callable[[], Sequence[ChoiceUpdate] | None]: ...

    def listen(self, listener: Callable[[], None]) -> None: ...

    def ready(self) -> Iterator[Sequence[ChoiceUpdate]]: ...


class Sink:
    """Takes updates; the base class discards them."""

    # The updates to be taken among those there are; None: all. Raises GatewayError when a choice fails.
    among: Callable[[Iterator[Sequence[ChoiceUpdate]]], Iterator[Sequence[ChoiceUpdate]]] | None = None

    def take(self, updates: Sequence[ChoiceUpdate]) -> bool:
        """Take updates; return False to get nothing more until caught_up() has returned."""
        return True

    def end_turn(self) -> bool:
        """End the time slice; returns the same as take()."""
        return True

    def take_whole(self, updates: Sequence[ChoiceUpdate]) -> bool:
        """Take the only updates of a time slice."""
        keeps_up = self.take(updates)
        return self.end_turn() and keeps_up

    async def caught_up(self) -> None:
        pass


class Reading:
    def __init__(self, generation: Readable, sink: Sink) -> None:
        self._generation = generation
        self._sink = sink
        self._read_plain = generation.read_plain if sink.among is None else nothing_plain
        self._scheduler = generation.scheduler
        self._failure: Exception | None = None
        self._is_done = False  # to its end
        self._hears = False  # else it waits for a turn, or for to_end() to go on
        self._stands = asyncio.get_running_loop().create_future()  # nothing is read until to_end() went on

    async def to_end(self) -> None:
        """Read until the end. Raise GatewayError if a choice fails, and what the sink raises."""
        self._generation.listen(self._hear)
        try:
            while True:
                self._stands, self._hears = asyncio.get_running_loop().create_future(), True
                self._hear()
                await self._stands
                self._raise_failure()
                if self._is_done:
                    return
                await self._sink.caught_up()
        finally:
            self._stop()
            self._generation.listen(_nobody)  # or the two would hold each other, and all that the request had

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its frames have this one: a circle that holds the request for long

    def _stop(self) -> None:
        self._hears = False
        if not self._stands.done():
            self._stands.set_result(None)

    def _hear(self) -> None:
        if self._hears:
            self._hears = False
            self._scheduler.submit(self._read)

    def _read(self) -> bool:
        """Read until no event is ready, the sink blocks, or the time slice ends; return whether more is ready."""
        if self._stands.done():
            return False  # it was left while it waited for its turn
        is_over, keeps_up = False, True
        try:
            if (updates := self._read_plain()) is not None:  # nearly always: in half the steps of what follows
                keeps_up = self._sink.take_whole(updates)
            else:
                is_over, keeps_up = self._read_ready()
        except Exception as error:
            self._failure, keeps_up = error, False
        if self._is_done or not keeps_up:
            self._stop()
            return False
        self._hears = not is_over
        return is_over

    def _read_ready(self) -> tuple[bool, bool]:
        """Return whether the time slice ended, and whether the sink keeps up."""
        is_over, keeps_up, sink, num_taken = False, True, self._sink, 0
        ready = self._generation.ready()
        try:
            for updates in ready if sink.among is None else sink.among(ready):
                keeps_up = sink.take(updates)
                num_taken += len(updates)
                is_over = num_taken > 1 and self._scheduler.is_over  # one token, as most reads are of, asks no clock
                if is_over or not keeps_up:
                    break
            else:
                self._is_done = self._generation.is_over
        finally:
            keeps_up = sink.end_turn() and keeps_up
        return is_over, keeps_up


def nothing_plain() -> None:
    """Return None: a read_plain() for answers that need ready()."""


def _nobody() -> None:
    pass
