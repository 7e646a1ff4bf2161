"""The messages of rank 0 to its followers: MessagePack, so that reading one makes values and runs nothing.

    GroupStart     the first message: the settings by which every rank loads its part of the model
    MoveBlocks     block moves without a step
    RunStep        a step with all that rank 0 decided about it

Followers decide nothing again: whether a step is a graph and which, or which rows' logits are computed beside the
sampled ones, would be collectives that do not meet if two ranks came to two answers.

In each step of a group it is between replica_group.py on rank 0 and follower.py on the others. It knows no channel and
no device.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step_description import StepDescription
from engine_worker.scheduling.batch import Transfers


class GroupStart(msgspec.Struct, tag=True, array_like=True, frozen=True):
    settings: ExecutionSettings


class MoveBlocks(msgspec.Struct, tag=True, array_like=True, frozen=True):
    transfers: Transfers


class RunStep(msgspec.Struct, tag=True, array_like=True, frozen=True):
    description: bytes  # StepDescription.to_bytes()
    graph: tuple[int, bool] | None  # size, mixed; None: kernel by kernel
    looks: Sequence[tuple[int, int]]  # of the head products beside the step's own, in order: rows from, to
    num_samples: int  # token ids that rank 0 gives to all after the step; 0: it gives none

    @property
    def step(self) -> StepDescription:
        return StepDescription.from_bytes(self.description)


GroupMessage: TypeAlias = GroupStart | MoveBlocks | RunStep


def encode(message: GroupMessage) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def decode(data: bytes) -> GroupMessage:
    """Raises msgspec.ValidationError or msgspec.DecodeError for what encode() did not write."""
    return _DECODER.decode(data)


def start_of(data: bytes) -> GroupStart:
    """Decode the first message. Raises ValueError for another one."""
    message = decode(data)
    if not isinstance(message, GroupStart):
        raise ValueError("a group's first message starts it")
    return message


def work_of(data: bytes) -> MoveBlocks | RunStep:
    """Decode any later message. Raises ValueError for another start."""
    message = decode(data)
    if isinstance(message, GroupStart):
        raise ValueError("a group starts once")
    return message


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} is in no message")


def _of_type(wanted: type, value: Any) -> Any:
    if issubclass(wanted, Path):
        return Path(value)
    raise NotImplementedError(f"{wanted} is in no message")


_DECODER: msgspec.msgpack.Decoder[GroupMessage] = msgspec.msgpack.Decoder(GroupMessage, dec_hook=_of_type)
