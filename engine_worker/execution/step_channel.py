"""The step channel of a group on one host: rank 0 writes messages into a ring in a memfd, followers read them in order.

    page of each rank     what a follower tells: how many messages it has read, that it lives, its phase, why it ended
    NUM_SLOTS slots       magic, version, number, length, CRC32, then the message: bytes that nobody here looks into

A memfd has no name: nothing is left over, whoever dies how. A follower blocks on an eventfd of its own and takes no
processor while it waits; rank 0 waits only when a follower is NUM_SLOTS messages behind.

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
_PHASE_OFFSET, _PHASE_BYTES = 16, 112
_CAUSE_OFFSET, _CAUSE_BYTES = 128, _PAGE_BYTES - 128


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


class _Memory:
    """The mapped memfd: pages of followers, then slots."""

    def __init__(self, fd: int, size: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._first_slot = size * _PAGE_BYTES
        self._map = mmap.mmap(fd, self.num_bytes(size, slot_bytes))

    @staticmethod
    def num_bytes(size: int, slot_bytes: int) -> int:
        return size * _PAGE_BYTES + NUM_SLOTS * slot_bytes

    def close(self) -> None:
        self._map.close()

    def write_slot(self, number: int, message: bytes) -> None:
        header = _HEADER.pack(_MAGIC, VERSION, number, len(message))
        start = self._slot(number)
        crc32 = _CRC32.pack(zlib.crc32(message, zlib.crc32(header)))
        self._map[start : start + _PREFIX_BYTES + len(message)] = header + crc32 + message

    def read_slot(self, number: int) -> bytes:
        start = self._slot(number)
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

    def _slot(self, number: int) -> int:
        return self._first_slot + number % NUM_SLOTS * self.slot_bytes


class RingSender:
    """Rank 0's end. Messages are numbered from 1."""

    def __init__(self, size: int, slot_bytes: int) -> None:
        """`size`: ranks of the group, 0 included; a message has at most `slot_bytes` less a few."""
        self.wait_seconds = 0.0
        self.slot_bytes = -(-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._followers = range(1, size)
        self._number = 0
        self._memory_fd = os.memfd_create("pagestream-steps", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_fd, _Memory.num_bytes(size, self.slot_bytes))  # pages that nobody touches take none
        self._wakes = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE) for _ in self._followers]
        self._acknowledge = os.eventfd(0, os.EFD_CLOEXEC)
        self._memory = _Memory(self._memory_fd, size, self.slot_bytes)

    def fds(self, rank: int) -> ChannelFds:
        return ChannelFds(self._memory_fd, self._wakes[rank - 1], self._acknowledge)

    def send(self, message: bytes) -> None:
        if len(message) > self.slot_bytes - _PREFIX_BYTES:
            raise ValueError(f"a step of {len(message)} bytes; the channel's slots hold {self.slot_bytes}")
        self._wait_for_slot()
        self._number += 1
        self._memory.write_slot(self._number, message)
        for wake in self._wakes:
            os.eventfd_write(wake, 1)

    def messages_behind(self) -> list[int]:
        """Count the messages that each follower has not read."""
        return [self._number - self._memory.count(rank, _READ_OFFSET) for rank in self._followers]

    def beats(self, rank: int) -> int:
        """Count what a follower has beaten: another number than a while ago, and it lives."""
        return self._memory.count(rank, _BEATS_OFFSET)

    def phase(self, rank: int) -> str:
        return self._memory.text(rank, _PHASE_OFFSET)

    def cause(self, rank: int) -> str:
        """Why a follower that has ended did so, by its own account; empty if it had no time to tell."""
        return self._memory.text(rank, _CAUSE_OFFSET)

    def close(self) -> None:
        self._memory.close()
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
        return max(self.messages_behind()) < NUM_SLOTS


class RingReceiver:
    """A follower's end."""

    def __init__(self, fds: ChannelFds, rank: int, size: int) -> None:
        num_slot_bytes = os.fstat(fds.memory).st_size - _Memory.num_bytes(size, 0)
        self._memory = _Memory(fds.memory, size, num_slot_bytes // NUM_SLOTS)
        self._fds, self._rank = fds, rank
        self._number = 0

    def receive(self) -> bytes:
        os.eventfd_read(self._fds.wake)
        message = self._memory.read_slot(self._number + 1)
        self._number += 1
        self._memory.set_count(self._rank, _READ_OFFSET, self._number)
        os.eventfd_write(self._fds.acknowledge, 1)
        return message

    def beat(self) -> None:
        """Tell that this process lives. From one thread, whichever."""
        self._memory.set_count(self._rank, _BEATS_OFFSET, self._memory.count(self._rank, _BEATS_OFFSET) + 1)

    def enter(self, phase: str) -> None:
        """Tell what this follower does now; rank 0 names it should the follower end."""
        self._memory.set_text(self._rank, _PHASE_OFFSET, phase, _PHASE_BYTES)

    def tell_cause(self, cause: str) -> None:
        """To be called right before this process ends."""
        self._memory.set_text(self._rank, _CAUSE_OFFSET, cause, _CAUSE_BYTES)


def _check(number: int, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ChannelCorrupted(f"message {number}: its {what} is {found!r}, not {expected!r}")
