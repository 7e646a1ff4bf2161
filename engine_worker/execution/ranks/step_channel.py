"""The step channel of a group on one host: rank 0 writes messages to a ring in a memfd, followers read them in order.

    page of each rank     written by the follower: number and times of read messages, beats, phases, cause of its end
    NUM_SLOTS slots       magic, version, number, length, CRC32, then the bytes of the message

A memfd has no name, so nothing is left over after any kind of end. A follower blocks on its own eventfd; rank 0 waits
only if a follower is NUM_SLOTS messages late. Followers start before the size of a step is known, so the slots are
created before the first message. Linux only.
"""

import mmap
import os
import struct
import time
import zlib
from typing import NamedTuple, Protocol

NUM_SLOTS = 4
VERSION = 1
_MAGIC = b"PSTP"
_PAGE_BYTES = 4096
_HEADER = struct.Struct("<4sHxxqI")  # magic, version, number, length
_CRC32 = struct.Struct("<I")
_PREFIX_BYTES = _HEADER.size + _CRC32.size
_COUNT = struct.Struct("<q")
_TEXT = struct.Struct("<H")
_READ_OFFSET, _BEATS_OFFSET = 0, 8
_READ_AT_OFFSET = 16  # times of the last NUM_SLOTS messages, in ns of the machine's monotonic clock
_PHASES_OFFSET, _PHASES_BYTES = 64, 448  # names, each with the monotonic second of its beginning
_CAUSE_OFFSET, _CAUSE_BYTES = 512, _PAGE_BYTES - 512


class ChannelCorrupted(Exception):
    """A slot does not hold the next message. The text names the found and the expected value."""


class MessageSender(Protocol):
    """Rank 0's end of a channel."""

    wait_seconds: float  # time spent waiting for free slots

    def send(self, message: bytes) -> None: ...


class MessageReceiver(Protocol):
    """A follower's end of a channel."""

    def receive(self) -> bytes:
        """Wait for the next message.

        Raises:
            ChannelCorrupted: If the message is not the next one, or is damaged.
        """


class ChannelFds(NamedTuple):
    """The file descriptors that a follower inherits."""

    memory: int
    wake: int  # of this follower alone
    acknowledge: int


class _Pages:
    """The mapped beginning of the memfd: one page per rank. Rank 0 does not write to its page."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size * _PAGE_BYTES)

    def close(self) -> None:
        self._map.close()

    def count(self, rank: int, offset: int) -> int:
        return int(_COUNT.unpack_from(self._map, rank * _PAGE_BYTES + offset)[0])

    def set_count(self, rank: int, offset: int, count: int) -> None:
        _COUNT.pack_into(self._map, rank * _PAGE_BYTES + offset, count)

    def text(self, rank: int, offset: int) -> str:
        start = rank * _PAGE_BYTES + offset
        (length,) = _TEXT.unpack_from(self._map, start)
        return self._map[start + _TEXT.size : start + _TEXT.size + length].decode(errors="replace")

    def set_text(self, rank: int, offset: int, text: str, max_bytes: int) -> None:
        start, encoded = rank * _PAGE_BYTES + offset, text.encode()[: max_bytes - _TEXT.size]
        self._map[start : start + _TEXT.size + len(encoded)] = _TEXT.pack(len(encoded)) + encoded


class _Slots:
    """The mapped slots after the pages. Their size follows from the memfd's length."""

    def __init__(self, fd: int, size: int) -> None:
        self._first_slot = size * _PAGE_BYTES
        self.slot_bytes = (os.fstat(fd).st_size - self._first_slot) // NUM_SLOTS
        self._map = mmap.mmap(fd, self._first_slot + NUM_SLOTS * self.slot_bytes)

    def close(self) -> None:
        self._map.close()

    def write(self, number: int, message: bytes) -> None:
        if len(message) > self.slot_bytes - _PREFIX_BYTES:
            raise ValueError(f"step of {len(message)} bytes: a slot of the channel holds {self.slot_bytes}")
        header = _HEADER.pack(_MAGIC, VERSION, number, len(message))
        start = self._start(number)
        body = start + _PREFIX_BYTES
        self._map[start:body] = header + _CRC32.pack(zlib.crc32(message, zlib.crc32(header)))
        self._map[body : body + len(message)] = message  # joined with the header it is copied twice

    def read(self, number: int) -> bytes:
        start = self._start(number)
        header = self._map[start : start + _HEADER.size]
        magic, version, found, length = _HEADER.unpack(header)
        _check(number, "magic", magic, _MAGIC)
        _check(number, "version", version, VERSION)
        _check(number, "number", found, number)
        if length > self.slot_bytes - _PREFIX_BYTES:
            raise ChannelCorrupted(f"message {number}: {length} bytes, a slot holds {self.slot_bytes - _PREFIX_BYTES}")
        (crc32,) = _CRC32.unpack_from(self._map, start + _HEADER.size)
        message = self._map[start + _PREFIX_BYTES : start + _PREFIX_BYTES + length]
        _check(number, "CRC32", zlib.crc32(message, zlib.crc32(header)), crc32)
        return message

    def _start(self, number: int) -> int:
        return self._first_slot + number % NUM_SLOTS * self.slot_bytes


class RingSender:
    """Rank 0's end. Messages are numbered from 1."""

    def __init__(self, size: int) -> None:
        """Create a channel for `size` ranks, including 0."""
        self.wait_seconds = 0.0
        self._size = size
        self._followers = range(1, size)
        self._number = 0
        self._read_by_all = 0  # number of messages, at the last look
        self._sent_at = [0] * NUM_SLOTS  # in the unit of _READ_AT_OFFSET
        self._memory_fd = os.memfd_create("pagestream-steps", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_fd, size * _PAGE_BYTES)
        self._wakes = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE) for _ in self._followers]
        self._acknowledge = os.eventfd(0, os.EFD_CLOEXEC)
        self._pages = _Pages(self._memory_fd, size)
        self._slots: _Slots | None = None

    def make_slots(self, slot_bytes: int) -> None:
        """Create the slots. Call once, before the first message. A message has less than `slot_bytes` bytes."""
        assert self._slots is None, "followers may have mapped them"
        slot_bytes = -(-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES
        # Untouched pages take no memory.
        os.ftruncate(self._memory_fd, self._size * _PAGE_BYTES + NUM_SLOTS * slot_bytes)
        self._slots = _Slots(self._memory_fd, self._size)

    def fds(self, rank: int) -> ChannelFds:
        return ChannelFds(self._memory_fd, self._wakes[rank - 1], self._acknowledge)

    def send(self, message: bytes) -> None:
        """Write the next message; waits for a free slot.

        Raises:
            ValueError: If the message is larger than a slot.
        """
        assert self._slots is not None, "make_slots() comes first"
        self._wait_for_slot()
        self._slots.write(self._number + 1, message)
        self._number += 1
        self._sent_at[self._number % NUM_SLOTS] = time.monotonic_ns()
        for wake in self._wakes:
            os.eventfd_write(wake, 1)

    def messages_behind(self) -> list[int]:
        """Count the messages that each follower has not read."""
        return [self._number - self._pages.count(rank, _READ_OFFSET) for rank in self._followers]

    def skew_seconds(self) -> float:
        """Return the seconds from the sending of the latest fully read message to its last reading; 0 before any."""
        number = min(self._pages.count(rank, _READ_OFFSET) for rank in self._followers)
        read_at = max(self._pages.count(rank, _read_at(number)) for rank in self._followers)
        return max(0.0, 1e-9 * (read_at - self._sent_at[number % NUM_SLOTS]))

    def beats(self, rank: int) -> int:
        """Return the number of beats of a follower. It responds if the number grows."""
        return self._pages.count(rank, _BEATS_OFFSET)

    def phases(self, rank: int) -> list[tuple[str, float]]:
        """Return the phases of a follower, each with the monotonic second of its beginning."""
        entries = [entry.rpartition(" ") for entry in self._pages.text(rank, _PHASES_OFFSET).splitlines()]
        # A follower that was killed while writing leaves half an entry.
        return [(phase, float(seconds)) for phase, _, seconds in entries if seconds.replace(".", "").isdecimal()]

    def phase(self, rank: int) -> str:
        """Return the current phase; empty before the first."""
        phases = self.phases(rank)
        return phases[-1][0] if phases else ""

    def cause(self, rank: int) -> str:
        """Return the reason for a follower's end as it reported it; empty if it could not."""
        return self._pages.text(rank, _CAUSE_OFFSET)

    def close(self) -> None:
        self._pages.close()
        if self._slots is not None:
            self._slots.close()
        for fd in (self._memory_fd, self._acknowledge, *self._wakes):
            os.close(fd)

    def _wait_for_slot(self) -> None:
        if self._slot_is_free():
            return
        started = time.perf_counter()
        while not self._slot_is_free():
            os.eventfd_read(self._acknowledge)
        self.wait_seconds += time.perf_counter() - started

    def _slot_is_free(self) -> bool:
        """Return whether all have read the next message's slot. Pages are read only if the last look was negative."""
        if self._number - self._read_by_all >= NUM_SLOTS:
            self._read_by_all = min(self._pages.count(rank, _READ_OFFSET) for rank in self._followers)
        return self._number - self._read_by_all < NUM_SLOTS


class RingReceiver:
    """A follower's end."""

    def __init__(self, fds: ChannelFds, rank: int, size: int) -> None:
        self._pages = _Pages(fds.memory, size)
        self._slots: _Slots | None = None  # they exist after the first message
        self._fds, self._rank, self._size = fds, rank, size
        self._number = 0
        self._phases: list[str] = []

    def receive(self) -> bytes:
        """Wait for the next message. Raises ChannelCorrupted."""
        os.eventfd_read(self._fds.wake)
        if self._slots is None:
            self._slots = _Slots(self._fds.memory, self._size)
        message = self._slots.read(self._number + 1)
        self._number += 1
        self._pages.set_count(self._rank, _read_at(self._number), time.monotonic_ns())
        self._pages.set_count(self._rank, _READ_OFFSET, self._number)
        os.eventfd_write(self._fds.acknowledge, 1)
        return message

    def beat(self) -> None:
        """Count a beat. Call from one thread only."""
        self._pages.set_count(self._rank, _BEATS_OFFSET, self._pages.count(self._rank, _BEATS_OFFSET) + 1)

    def enter(self, phase: str) -> None:
        """Report the current phase; rank 0 names it if the follower ends."""
        if not self._phases or self._phases[-1].rpartition(" ")[0] != phase:
            self._phases.append(f"{phase} {time.monotonic():.3f}")
            self._pages.set_text(self._rank, _PHASES_OFFSET, "\n".join(self._phases), _PHASES_BYTES)

    def tell_cause(self, cause: str) -> None:
        """Report the reason for the end of this process. Call right before it."""
        self._pages.set_text(self._rank, _CAUSE_OFFSET, cause, _CAUSE_BYTES)


def _read_at(number: int) -> int:
    """Return the offset in a page of the time at which a message was read."""
    return _READ_AT_OFFSET + number % NUM_SLOTS * _COUNT.size


def _check(number: int, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ChannelCorrupted(f"message {number}: its {what} is {found!r}, not {expected!r}")
