"""The messages of rank 0 to its followers, in MessagePack, so that decoding creates values only.

    GroupStart     the first message: the settings by which every rank loads its part of the model
    MoveBlocks     block moves without a step
    RunStep        a step with all decisions of rank 0
    MakeDrafts     what follows a step if the device makes drafts

Followers decide nothing: if two ranks chose different graphs or rows of logits, their collectives would not match.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from engine_worker.execution.settings import NO_DRAFTS, DraftSettings, ExecutionSettings
from engine_worker.execution.step.draft_description import DraftDescription
from engine_worker.execution.step.step_description import StepDescription
from engine_worker.kv.transfers import Transfers


class GroupStart(msgspec.Struct, tag=True, array_like=True, frozen=True):
    settings: ExecutionSettings
    drafts: DraftSettings = NO_DRAFTS


class MoveBlocks(msgspec.Struct, tag=True, array_like=True, frozen=True):
    transfers: Transfers


class RunStep(msgspec.Struct, tag=True, array_like=True, frozen=True):
    description: bytes  # StepDescription.to_bytes()
    graph: tuple[int, bool] | None  # size, mixed; None: no graph
    looks: Sequence[tuple[int, int]]  # row ranges of additional logits, in order
    num_samples: int  # token ids that rank 0 broadcasts after the step; 0: no broadcast
    pooled: Sequence[int] = ()  # rows of hidden states, after `looks`

    @property
    def step(self) -> StepDescription:
        return StepDescription.from_bytes(self.description)


class MakeDrafts(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Follows the RunStep that it is about."""

    arrays: tuple[bytes, bytes, bytes, bytes]  # int32, of DraftDescription
    max_seq_len: int
    step: int
    number: int  # for each sequence

    @classmethod
    def of(cls, description: DraftDescription, number: int) -> "MakeDrafts":
        arrays = description.following, description.first_samples, description.last_samples, description.table_rows
        following, firsts, lasts, rows = (values.tobytes() for values in arrays)
        return cls((following, firsts, lasts, rows), description.max_seq_len, description.step, number)

    @property
    def description(self) -> DraftDescription:
        following, firsts, lasts, rows = (np.frombuffer(values, dtype=np.int32) for values in self.arrays)
        return DraftDescription(following, firsts, lasts, rows, [], self.max_seq_len, self.step)


Work: TypeAlias = MoveBlocks | RunStep | MakeDrafts
GroupMessage: TypeAlias = GroupStart | Work


def encode(message: GroupMessage) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def decode(data: bytes) -> GroupMessage:
    """Decode a message of encode().

    Raises:
        msgspec.DecodeError: If `data` is not such a message (ValidationError is a subclass).
    """
    return _DECODER.decode(data)


def start_of(data: bytes) -> GroupStart:
    """Decode the first message. Raises ValueError for another one."""
    message = decode(data)
    if not isinstance(message, GroupStart):
        raise ValueError(f"first message of a group: expected GroupStart, got {type(message).__name__}")
    return message


def work_of(data: bytes) -> Work:
    """Decode any later message. Raises ValueError for another start."""
    message = decode(data)
    if isinstance(message, GroupStart):
        raise ValueError("message of a group: GroupStart must come first and only once")
    return message


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} cannot be encoded")


def _of_type(wanted: type, value: Any) -> Any:
    if issubclass(wanted, Path):
        return Path(value)
    raise NotImplementedError(f"{wanted} cannot be decoded")


_DECODER: msgspec.msgpack.Decoder[GroupMessage] = msgspec.msgpack.Decoder(GroupMessage, dec_hook=_of_type)
