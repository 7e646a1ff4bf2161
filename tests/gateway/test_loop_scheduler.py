"""The event loop is shared by key in time slices. Pieces of work are counted, and only work moves the clock."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from gateway.pipeline.answer import WRITE_BYTES, AnswerLoop
from gateway.work.loop_scheduler import ROUND_SECONDS, SLICE_SECONDS, LoopScheduler

PIECE_SECONDS = SLICE_SECONDS / 4
MAX_PIECES_PER_SLICE = 5  # pieces: the last may begin before the slice ends, because sums of quarters are inexact


class Work:
    """Pieces of a key that are done one after another and recorded in a shared log."""

    def __init__(self, loop: "CountedLoop", key: str, num_pieces: int, seconds: float = PIECE_SECONDS) -> None:
        self._loop = loop
        self._key = key
        self._seconds = seconds
        self.num_left = num_pieces
        self.scheduler = loop.scheduler.of(key)

    def begin(self) -> None:
        self.scheduler.submit(self._do)

    def _do(self) -> bool:
        while self.num_left:
            self.num_left -= 1
            self._loop.now += self._seconds
            self._loop.log.append(self._key)
            if self.scheduler.is_over:
                break
        return self.num_left > 0


class CountedLoop:
    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []  # the key whose piece was done
        self.scheduler = LoopScheduler(lambda: self.now)

    async def run(self, while_true: Callable[[], bool]) -> list[list[str]]:
        """Return the keys whose pieces were done in each iteration of the loop."""
        iterations = []
        while while_true():
            before = len(self.log)
            await asyncio.sleep(0)
            iterations.append(self.log[before:])
        return iterations


async def test_short_work_is_done_at_once_and_the_rest_in_slices() -> None:
    loop = CountedLoop()
    small, large = Work(loop, "small", 1), Work(loop, "large", 1000)
    small.begin()
    large.begin()
    assert small.num_left == 0 and 1000 - large.num_left <= MAX_PIECES_PER_SLICE
    iterations = await loop.run(lambda: large.num_left > 0)
    assert all(0 < len(done) <= MAX_PIECES_PER_SLICE for done in iterations[1:])


async def test_work_of_a_lone_key_runs_at_once() -> None:
    loop = CountedLoop()
    alone = [Work(loop, "alone", 1) for _ in range(20)]
    alone[0].scheduler.open()
    for work in alone:
        work.begin()
    assert not any(work.num_left for work in alone)
    other = Work(loop, "other", 8)
    other.scheduler.open()
    other.begin()
    assert len(loop.log) - 20 <= MAX_PIECES_PER_SLICE
    await loop.run(lambda: other.num_left > 0)  # what the first key had alone is not taken off its later slices
    again = [Work(loop, name, 8) for name in ("alone", "other")]
    for work in again:
        work.begin()
    before = len(loop.log)
    await loop.run(lambda: any(work.num_left for work in again))
    done = loop.log[before:]
    assert abs(done.count("alone") - done.count("other")) <= MAX_PIECES_PER_SLICE
    other.scheduler.close()
    begun = [Work(loop, "alone", 1) for _ in range(20)]
    for work in begun:
        work.begin()
    assert not any(work.num_left for work in begun)


@pytest.mark.parametrize("num_works", [1, 128])
async def test_key_waits_for_at_most_one_slice_of_another_key(num_works: int) -> None:
    """This holds for any backlog, in one answer or in many."""
    loop = CountedLoop()
    hostile = [Work(loop, "hostile", 100_000 // num_works) for _ in range(num_works)]
    for work in hostile:
        work.begin()
    assert len(loop.log) <= MAX_PIECES_PER_SLICE, "by the task that receives all events"
    for _ in range(50):
        await loop.run(iter([True, True, False]).__next__)
        before = len(loop.log)
        polite = Work(loop, "polite", 1)
        asyncio.get_running_loop().call_soon(polite.begin)  # like data from a socket
        await loop.run(lambda polite=polite: polite.num_left > 0)  # type: ignore[misc]
        waited_for = loop.log[before : loop.log.index("polite", before)]
        assert len(waited_for) <= MAX_PIECES_PER_SLICE


async def test_overloaded_keys_get_equal_shares() -> None:
    loop = CountedLoop()
    works = [*(Work(loop, "many", 1_000) for _ in range(20)), Work(loop, "one", 1_000)]
    for work in works:
        work.begin()
    await loop.run(lambda: works[-1].num_left > 0)
    done = loop.log[: len(loop.log) - loop.log[::-1].index("one")]
    assert abs(done.count("many") - done.count("one")) <= 2 * MAX_PIECES_PER_SLICE


async def test_idle_time_is_not_saved() -> None:
    """A key that returns after long has no more than its share."""
    loop = CountedLoop()
    busy = Work(loop, "busy", 10_000)
    busy.begin()
    await loop.run(lambda: busy.num_left > 5_000)
    before = len(loop.log)
    returned = Work(loop, "returned", 100)
    returned.begin()
    await loop.run(lambda: returned.num_left > 0)
    assert abs(loop.log[before:].count("busy") - 100) <= 2 * MAX_PIECES_PER_SLICE


async def test_excess_time_is_repaid() -> None:
    """A key whose pieces are ten slices long (a long tool call) gets as much time as one with short pieces."""
    loop = CountedLoop()
    coarse, fine = Work(loop, "coarse", 50, 10 * SLICE_SECONDS), Work(loop, "fine", 2_000)
    coarse.begin()
    fine.begin()
    await loop.run(lambda: fine.num_left > 0 and coarse.num_left > 0)
    seconds = [loop.log.count("coarse") * 10 * SLICE_SECONDS, loop.log.count("fine") * PIECE_SECONDS]
    assert abs(seconds[0] - seconds[1]) <= 11 * SLICE_SECONDS


async def test_lone_key_never_waits() -> None:
    loop = CountedLoop()
    alone = Work(loop, "alone", 50, 10 * SLICE_SECONDS)
    alone.begin()
    iterations = await loop.run(lambda: alone.num_left > 0)
    assert all(done for done in iterations[1:]), "a debt without waiting keys delays nothing"


async def test_round_is_bounded_for_any_number_of_keys() -> None:
    loop = CountedLoop()
    works = [Work(loop, f"key {number}", 100) for number in range(40)]
    for work in works:
        work.begin()
    iterations = await loop.run(lambda: any(work.num_left for work in works))
    max_pieces = ROUND_SECONDS / SLICE_SECONDS * MAX_PIECES_PER_SLICE
    assert max(map(len, iterations)) <= max_pieces
    firsts = loop.log[: 40 * MAX_PIECES_PER_SLICE]
    assert len(set(firsts)) == 40, "no key is skipped"


class Tokens:
    """The part of an Answer that AnswerLoop uses: tokens that are ready, each as long as one write."""

    def __init__(self, loop: CountedLoop, key: str, num_tokens: int) -> None:
        self.scheduler = loop.scheduler.of(key)
        self.num_left = num_tokens
        self.listener: Callable[[], None] | None = None
        self._loop = loop

    @property
    def is_over(self) -> bool:
        return not self.num_left

    def listen(self, listener: Callable[[], None]) -> None:
        self.listener = listener

    def write_ready(self, out: bytearray) -> Iterator[int]:
        while self.num_left:
            self.num_left -= 1
            self._loop.now += PIECE_SECONDS
            out += bytes(WRITE_BYTES)
            yield 1


class Taker:
    """An output that logs each write, and does not keep up with one of them until it may go on."""

    def __init__(self, loop: CountedLoop, name: str, refuses: int = 0) -> None:
        self._loop = loop
        self._name = name
        self._refuses = refuses
        self._num_taken = 0
        self.may_go_on = asyncio.Event()

    def push(self, data: bytes) -> bool:
        self._loop.log.append(self._name)
        self._num_taken += 1
        return self._num_taken != self._refuses

    async def drain(self) -> None:
        await self.may_go_on.wait()


async def test_first_token_beside_100000_waits_for_a_few_slices() -> None:
    loop = CountedLoop()
    many = [Tokens(loop, "hostile", 1_000) for _ in range(100)]
    answers = [asyncio.create_task(AnswerLoop(tokens, Taker(loop, "hostile")).to_end()) for tokens in many]
    await asyncio.sleep(0)
    before = len(loop.log)
    await asyncio.create_task(AnswerLoop(Tokens(loop, "polite", 1), Taker(loop, "polite")).to_end())
    assert loop.log[before:].index("polite") <= 2 * MAX_PIECES_PER_SLICE
    assert sum(tokens.num_left for tokens in many) > 99_000
    await asyncio.gather(*answers)
    assert loop.log.count("hostile") == 100_000, "no token is lost"


async def test_slow_reader_delays_only_its_own_answer() -> None:
    """It gets no slices until it has caught up, and its unread tokens stay where they are."""
    loop = CountedLoop()
    slow, quick = Tokens(loop, "a", 100), Tokens(loop, "a", 100)
    taker = Taker(loop, "slow", refuses=3)
    answer = asyncio.create_task(AnswerLoop(slow, taker).to_end())
    await AnswerLoop(quick, Taker(loop, "quick")).to_end()
    assert loop.log.count("slow") == 3 and slow.num_left == 97
    assert slow.listener is not None
    slow.listener()
    await asyncio.sleep(0)
    assert loop.log.count("slow") == 3
    taker.may_go_on.set()
    await answer
    assert loop.log.count("slow") == 100


class OneByOne(Tokens):
    """Short tokens; each one arrives when the previous one was read."""

    def write_ready(self, out: bytearray) -> Iterator[int]:
        self.num_left -= 1
        out += b"x"
        yield 1


async def test_slow_reader_is_awaited_between_short_tokens() -> None:
    loop = CountedLoop()
    slow = OneByOne(loop, "a", 100)
    taker = Taker(loop, "slow", refuses=1)
    answer = asyncio.create_task(AnswerLoop(slow, taker).to_end())
    await asyncio.sleep(0)
    assert slow.listener is not None
    for _ in range(5):
        slow.listener()
    assert loop.log == ["slow"], "it read one token and has not caught up"
    taker.may_go_on.set()
    while not answer.done():
        slow.listener()
        await asyncio.sleep(0)
    assert loop.log == ["slow"] * 100


async def test_exception_is_raised_where_the_answer_is_read() -> None:
    class Failing(Tokens):
        def write_ready(self, out: bytearray) -> Iterator[int]:
            yield 1
            raise ValueError("no such text")

    loop = CountedLoop()
    Work(loop, "a", 100).begin()  # so that it is read in a later slice
    with pytest.raises(ValueError, match="no such text"):
        await AnswerLoop(Failing(loop, "a", 10)).to_end()
    other = Work(loop, "a", 100)
    other.begin()
    await loop.run(lambda: other.num_left > 0)


async def test_abandoned_answer_gets_no_slices() -> None:
    loop = CountedLoop()
    Work(loop, "a", 8).begin()
    tokens = Tokens(loop, "a", 1_000)
    answer = asyncio.create_task(AnswerLoop(tokens, Taker(loop, "gone")).to_end())
    await asyncio.sleep(0)
    num_left = tokens.num_left
    answer.cancel()
    await asyncio.wait([answer])
    for _ in range(5):
        await asyncio.sleep(0)
    assert num_left - tokens.num_left <= MAX_PIECES_PER_SLICE
