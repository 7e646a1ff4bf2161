"""The step channel of a group on one host: rank 0 writes messages into a ring in a memfd, followers read them in order.

    page of each rank     what a follower tells: how many messages it has read and when, that it lives, its phases, why
                          it ended
    NUM_SLOTS slots       magic, version, number, length, CRC32, then the message: bytes that nobody here looks into

A memfd has no name: nothing is left over, whoever dies how. A follower blocks on an eventfd of its own and takes no
processor while it waits; rank 0 waits only when a follower is NUM_SLOTS messages behind. Followers are started before
anybody knows how large a step may be: the slots come later, before the first message.

It is used at a start and in every step of a group of ranks, between replica_group.py on rank 0 and follower.py on the
others. It knows no step and no tensor. Linux only.
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
_READ_AT_OFFSET = 16  # of the last NUM_SLOTS messages, ns of the machine's monotonic clock
_PHASES_OFFSET, _PHASES_BYTES = 64, 448  # names with the second at which each began
_CAUSE_OFFSET, _CAUSE_BYTES = 512, _PAGE_BYTES - 512


class ChannelCorrupted(Exception):
    """A slot does not hold the message that is next; the text has what was found and what should be there."""


class MessageSender(Protocol):
    """Rank 0's end of a channel."""

    wait_seconds: float  # spent until followers had read what was in the way

    def send(self, message: bytes) -> None: ...


class MessageReceiver(Protocol):
    """A follower's end of a channel."""

    def receive(self) -> bytes:
        """Wait for the next message. Raises ChannelCorrupted."""


class ChannelFds(NamedTuple):
    """The file descriptors that a follower inherits."""

    memory: int
    wake: int  # of this follower alone
    acknowledge: int


class _Pages:
    """The beginning of the memfd, mapped: a page of each rank. Rank 0 has none of its own to write."""

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

    def set_text(self, rank: int, offset: int, text: str, most_bytes: int) -> None:
        start, encoded = rank * _PAGE_BYTES + offset, text.encode()[: most_bytes - _TEXT.size]
        self._map[start : start + _TEXT.size + len(encoded)] = _TEXT.pack(len(encoded)) + encoded


class _Slots:
    """The slots behind the pages, mapped: as many bytes each as the memfd's length says."""

    def __init__(self, fd: int, size: int) -> None:
        self._first_slot = size * _PAGE_BYTES
        self.slot_bytes = (os.fstat(fd).st_size - self._first_slot) // NUM_SLOTS
        self._map = mmap.mmap(fd, self._first_slot + NUM_SLOTS * self.slot_bytes)

    def close(self) -> None:
        self._map.close()

    def write(self, number: int, message: bytes) -> None:
        if len(message) > self.slot_bytes - _PREFIX_BYTES:
            raise ValueError(f"a step of {len(message)} bytes; the channel's slots hold {self.slot_bytes}")
        header = _HEADER.pack(_MAGIC, VERSION, number, len(message))
        start = self._start(number)
        behind = start + _PREFIX_BYTES
        self._map[start:behind] = header + _CRC32.pack(zlib.crc32(message, zlib.crc32(header)))
        self._map[behind : behind + len(message)] = message  # by itself: put behind the rest first, it is copied twice

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
        """`size`: ranks of the group, 0 included."""
        self.wait_seconds = 0.0
        self._size = size
        self._followers = range(1, size)
        self._number = 0
        self._read_by_all = 0  # messages, when it was last asked
        self._sent_at = [0] * NUM_SLOTS  # as _READ_AT_OFFSET
        self._memory_fd = os.memfd_create("pagestream-steps", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_fd, size * _PAGE_BYTES)
        self._wakes = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE) for _ in self._followers]
        self._acknowledge = os.eventfd(0, os.EFD_CLOEXEC)
        self._pages = _Pages(self._memory_fd, size)
        self._slots: _Slots | None = None

    def make_slots(self, slot_bytes: int) -> None:
        """To be called once, before the first message, which as any later one has `slot_bytes` less a few at most."""
        assert self._slots is None, "followers may have mapped them"
        slot_bytes = -(-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES
        # Pages that nobody touches take no memory.
        os.ftruncate(self._memory_fd, self._size * _PAGE_BYTES + NUM_SLOTS * slot_bytes)
        self._slots = _Slots(self._memory_fd, self._size)

    def fds(self, rank: int) -> ChannelFds:
        return ChannelFds(self._memory_fd, self._wakes[rank - 1], self._acknowledge)

    def send(self, message: bytes) -> None:
        """Raises ValueError for a message that no slot holds."""
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
        """How long after its sending the last follower read the latest message that all have read; 0 before any."""
        number = min(self._pages.count(rank, _READ_OFFSET) for rank in self._followers)
        read_at = max(self._pages.count(rank, _read_at(number)) for rank in self._followers)
        return max(0.0, 1e-9 * (read_at - self._sent_at[number % NUM_SLOTS]))

    def beats(self, rank: int) -> int:
        """Count what a follower has beaten: another number than a while ago, and it lives."""
        return self._pages.count(rank, _BEATS_OFFSET)

    def phases(self, rank: int) -> list[tuple[str, float]]:
        """The phases of a follower until now, each with the second of the machine's monotonic clock it began at."""
        told = [entry.rpartition(" ") for entry in self._pages.text(rank, _PHASES_OFFSET).splitlines()]
        # One that was killed while it wrote leaves half an entry.
        return [(phase, float(seconds)) for phase, _, seconds in told if seconds.replace(".", "").isdecimal()]

    def phase(self, rank: int) -> str:
        """The present one; empty before the first."""
        phases = self.phases(rank)
        return phases[-1][0] if phases else ""

    def cause(self, rank: int) -> str:
        """Why a follower that has ended did so, by its own account; empty if it had no time to tell."""
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
        """Whether the slot of the next message was read by all: asked of them only where they had not, as last seen."""
        if self._number - self._read_by_all >= NUM_SLOTS:
            self._read_by_all = min(self._pages.count(rank, _READ_OFFSET) for rank in self._followers)
        return self._number - self._read_by_all < NUM_SLOTS


class RingReceiver:
    """A follower's end."""

    def __init__(self, fds: ChannelFds, rank: int, size: int) -> None:
        self._pages = _Pages(fds.memory, size)
        self._slots: _Slots | None = None  # there are some when the first message has come
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
        """Tell that this process lives. From one thread, whichever."""
        self._pages.set_count(self._rank, _BEATS_OFFSET, self._pages.count(self._rank, _BEATS_OFFSET) + 1)

    def enter(self, phase: str) -> None:
        """Tell what this follower does now; rank 0 names it should the follower end."""
        if not self._phases or self._phases[-1].rpartition(" ")[0] != phase:
            self._phases.append(f"{phase} {time.monotonic():.3f}")
            self._pages.set_text(self._rank, _PHASES_OFFSET, "\n".join(self._phases), _PHASES_BYTES)

    def tell_cause(self, cause: str) -> None:
        """To be called right before this process ends."""
        self._pages.set_text(self._rank, _CAUSE_OFFSET, cause, _CAUSE_BYTES)


def _read_at(number: int) -> int:
    """Return where a page has the time at which a message was read."""
    return _READ_AT_OFFSET + number % NUM_SLOTS * _COUNT.size


def _check(number: int, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ChannelCorrupted(f"message {number}: its {what} is {found!r}, not {expected!r}")
