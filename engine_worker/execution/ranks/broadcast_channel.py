"""The step channel of a group that spans hosts: messages of rank 0 as broadcasts of torch.distributed over gloo.

The header is the same as on one host (step_channel.py): number, length, and CRC32. A rank whose peer has died gets an
error with its next message.
"""

import time
import zlib

import torch
import torch.distributed as dist

from engine_worker.execution.ranks.step_channel import ChannelCorrupted


class BroadcastSender:
    def __init__(self, group: dist.ProcessGroup) -> None:
        """Use `group`, a gloo group of this channel alone, in which this process is rank 0."""
        self.wait_seconds = 0.0
        self._group = group
        self._number = 0

    def send(self, message: bytes) -> None:
        started = time.perf_counter()
        self._number += 1
        header = torch.tensor([self._number, len(message), zlib.crc32(message)], dtype=torch.int64)
        dist.broadcast(header, group=self._group, group_src=0)
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), group=self._group, group_src=0)
        self.wait_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Close the connections. The other ranks end when they notice it."""
        dist.destroy_process_group(self._group)
        del self._group  # the connections close with the last reference


class BroadcastReceiver:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._number = 0

    def receive(self) -> bytes:
        """Wait for the next message.

        Raises:
            ChannelCorrupted: If the message is not the next one, or is damaged.
            RuntimeError: If rank 0 is gone.
        """
        header = torch.empty(3, dtype=torch.int64)
        dist.broadcast(header, group=self._group, group_src=0)
        number, length, crc32 = header.tolist()
        if number != self._number + 1:
            raise ChannelCorrupted(f"message {self._number + 1}: its number is {number}, not {self._number + 1}")
        message = torch.empty(length, dtype=torch.uint8)
        dist.broadcast(message, group=self._group, group_src=0)
        data = message.numpy().tobytes()
        if (found := zlib.crc32(data)) != crc32:
            raise ChannelCorrupted(f"message {number}: its CRC32 is {found}, not {crc32}")
        self._number = number
        return data
