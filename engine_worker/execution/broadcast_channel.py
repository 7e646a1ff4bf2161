"""The step channel of a group that spans hosts: rank 0's messages, as broadcasts of a group of torch.distributed.

It says what step_channel.py says of one host, over gloo: a number, a length and a CRC32, then the message. A rank whose
peer has died gets an error with its next message. It knows no step; ranks meet in spanning_group.py. It is used at a
start and in every step of a group that spans hosts.
"""

import time
import zlib

import torch
import torch.distributed as dist

from engine_worker.execution.step_channel import ChannelCorrupted


class BroadcastSender:
    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group`: over gloo, used by this channel alone; its rank 0 is this process."""
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
        """Close the connections, by which the others end."""
        dist.destroy_process_group(self._group)
        del self._group  # they are closed with its last reference


class BroadcastReceiver:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._number = 0

    def receive(self) -> bytes:
        """Wait for the next message. Raises ChannelCorrupted, and RuntimeError when rank 0 is gone."""
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
