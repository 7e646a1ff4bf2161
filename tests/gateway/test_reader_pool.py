"""Work of many keys in few readers: round-robin, never all readers for one key, and no work for callers that left."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from gateway.work.reader_pool import INLINE_BYTES, ReaderPool


class Workshop:
    """A pool in which the test begins and ends each piece of work."""

    def __init__(self, num_threads: int) -> None:
        self.pool = ReaderPool(max_readers=num_threads)
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._open = set[str]()

    def ask(self, key: str, name: str, num_bytes: int | None = None) -> asyncio.Task[str]:
        return asyncio.create_task(self.pool.run(key, num_bytes, partial(self._work, name)))

    def let_end(self, name: str) -> None:
        with self._changed:
            self._open.add(name)
            self._changed.notify_all()

    async def has_begun(self, *names: str) -> None:
        """Wait until exactly these have begun, in any order."""
        while len(self.begun) < len(names):
            await asyncio.sleep(0)
        assert sorted(self.begun) == sorted(names)

    def _work(self, name: str) -> str:
        with self._changed:
            self.begun.append(name)
            self._changed.wait_for(lambda: name in self._open)
        return name


@pytest.fixture
async def workshop() -> AsyncIterator[Callable[[int], Workshop]]:
    made: list[Workshop] = []

    def make(num_threads: int) -> Workshop:
        made.append(Workshop(num_threads))
        return made[-1]

    yield make
    for shop in made:
        for name in shop.begun:
            shop.let_end(name)
        shop.pool.close()


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_backlog_of_one_key_leaves_a_thread_to_others(workshop: Callable[[int], Workshop]) -> None:
    shop = workshop(3)
    hostile = [shop.ask("hostile", f"h{i}") for i in range(20)]
    await shop.has_begun("h0")
    polite = shop.ask("polite", "p")
    await shop.has_begun("h0", "p")  # at once: none of the twenty precedes it
    shop.let_end("p")
    assert await polite == "p"
    await settled()
    await shop.has_begun("h0", "p")  # and its thread stays free for the next one
    for task in hostile:
        task.cancel()


async def test_keys_are_served_round_robin_for_any_backlog(workshop: Callable[[int], Workshop]) -> None:
    shop = workshop(1)
    for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
        shop.ask(name[0], name)
    for expected in ("a0", "b0", "c0", "a1", "b1", "a2", "a3"):
        while len(shop.begun) == 0 or shop.begun[-1] != expected:
            await asyncio.sleep(0)
        shop.let_end(expected)
    assert shop.begun == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


async def test_last_key_waits_for_at_most_one_piece_of_each_other(workshop: Callable[[int], Workshop]) -> None:
    shop = workshop(1)
    backlog = [shop.ask("hostile", f"h{i}") for i in range(20)]
    await shop.has_begun("h0")
    shop.ask("polite", "p")
    await settled()
    shop.let_end("h0")
    shop.let_end("h1")
    while "p" not in shop.begun:
        await asyncio.sleep(0)
    assert len(shop.begun) <= 3
    for task in backlog:
        task.cancel()


async def test_work_of_a_caller_that_left_is_not_begun(workshop: Callable[[int], Workshop]) -> None:
    shop = workshop(1)
    first, gone, last = (shop.ask("a", name) for name in ("first", "gone", "last"))
    await shop.has_begun("first")
    gone.cancel()
    await settled()
    assert shop.pool.num_waiting == 1
    first.cancel()  # its thread is not free until it ends
    await settled()
    await shop.has_begun("first")
    shop.let_end("first")
    shop.let_end("last")
    assert await last == "last"
    assert shop.begun == ["first", "last"] and shop.pool.num_waiting == 0


async def test_short_work_runs_at_once_and_errors_reach_the_caller() -> None:
    pool = ReaderPool(max_readers=1)
    assert await pool.run("a", INLINE_BYTES, threading.get_ident) == threading.get_ident()
    assert await pool.run("a", INLINE_BYTES + 1, threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await pool.run("a", None, lambda: 1 // 0)
    assert await pool.run("a", None, lambda: "still there") == "still there"
    pool.close()


async def test_error_holds_no_reference_to_its_work() -> None:
    """Before this, refused bodies of 2 MiB stayed in memory until the next cyclic garbage collection: 200 of them."""

    class Body:
        def refused(self) -> None:
            raise ValueError("no")

    gc.collect()
    gc.disable()
    try:
        pool = ReaderPool(max_readers=1)
        body = Body()
        is_there = weakref.ref(body)
        with contextlib.suppress(ValueError):
            await pool.run("a", None, body.refused)
        del body
        for _ in range(10):  # callbacks of the executor's future
            await asyncio.sleep(0)
        pool.close()
        assert is_there() is None
    finally:
        gc.enable()
