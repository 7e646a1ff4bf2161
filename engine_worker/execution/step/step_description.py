"""One step as a plain value that every rank turns into the same model input.

It has int32 arrays and block moves only. S: sequences with tokens. T: their tokens. N: rows of T with logits. B: blocks
of the longest table. G: groups of layers, each with its block tables.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_worker.kv.transfers import Transfers

Int32Array = NDArray[np.int32]


def feedback_of_draft(sequence: int, number: int) -> int:
    """Return the feedback of a row whose only token is a draft of the previous step; 0: the token before its drafts.

    Args:
        sequence: The place of the row's sequence in the previous step's DraftDescription.
        number: Of the draft, at most 7. The row's `seq_len` is an upper bound: see unpack_inputs().
    """
    return -2 - 8 * sequence - number


@dataclass(frozen=True, slots=True)
class StepDescription:
    query_start_loc: Int32Array  # [S + 1], first index in T of each sequence
    seq_lens: Int32Array  # [S], tokens in the cache after this step's are stored
    feedback: Int32Array  # [S], index of the previous step's sample that is the row's only token; -1: it has known ones
    token_ids: Int32Array  # [T], 0 for a token in flight
    logits_indices: Int32Array  # [N], rows of T
    block_tables: Int32Array  # [G, S, B], padded with block 0
    state_blocks: Int32Array  # [S], blocks of recurrent states; [0] if the model has none
    drafted_states: Int32Array  # [3, S], of recurrent states with drafts, see describe_states(); else [3, 0]
    max_query_len: int
    max_seq_len: int
    transfers: Transfers

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        return len(self.logits_indices)

    def to_bytes(self) -> bytes:
        """Return MessagePack of the concatenated arrays, their lengths, and the block moves."""
        arrays = (
            self.query_start_loc, self.seq_lens, self.feedback, self.token_ids, self.logits_indices, self.state_blocks,
        )  # fmt: skip
        slab = np.concatenate((*arrays, self.drafted_states.ravel(), self.block_tables.ravel()))
        slab = slab.astype(np.int32, copy=False)
        packed = _Packed(
            slab.tobytes(), len(self.block_tables), self.num_sequences, self.num_tokens, self.num_logits,
            len(self.state_blocks), self.drafted_states.shape[1], self.max_query_len, self.max_seq_len, self.transfers,
        )  # fmt: skip
        return msgspec.msgpack.encode(packed)

    @classmethod
    def from_bytes(cls, data: bytes) -> "StepDescription":
        """Decode the bytes of to_bytes().

        Raises:
            ValueError: If `data` is not such a description (msgspec.DecodeError is a subclass).
        """
        packed = msgspec.msgpack.decode(data, type=_Packed)
        rows = packed.num_sequences
        lengths = (
            rows + 1,
            rows,
            rows,
            packed.num_tokens,
            packed.num_logits,
            packed.num_states,
            3 * packed.num_drafted,
        )
        slab = np.frombuffer(bytearray(packed.slab), dtype=np.int32)  # a writable copy
        num_table_entries, num_tables = len(slab) - sum(lengths), packed.num_groups * rows
        if num_table_entries < 0 or (num_table_entries % num_tables if num_tables else num_table_entries):
            raise ValueError(
                f"step of {rows} sequences and {packed.num_tokens} tokens: its {len(slab)} numbers do not fit"
            )
        starts, lens, feedback, token_ids, logits_indices, states, drafted, tables = np.split(slab, np.cumsum(lengths))
        return cls(
            query_start_loc=starts,
            seq_lens=lens,
            feedback=feedback,
            token_ids=token_ids,
            logits_indices=logits_indices,
            block_tables=tables.reshape(packed.num_groups, rows, num_table_entries // num_tables if num_tables else 0),
            state_blocks=states,
            drafted_states=drafted.reshape(3, packed.num_drafted),
            max_query_len=packed.max_query_len,
            max_seq_len=packed.max_seq_len,
            transfers=packed.transfers,
        )


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    slab: bytes
    num_groups: int
    num_sequences: int
    num_tokens: int
    num_logits: int
    num_states: int
    num_drafted: int
    max_query_len: int
    max_seq_len: int
    transfers: Transfers


_NOTHING: Int32Array = np.zeros(0, dtype=np.int32)
EMPTY = StepDescription(
    np.zeros(1, dtype=np.int32),
    _NOTHING,
    _NOTHING,
    _NOTHING,
    _NOTHING,
    _NOTHING.reshape(0, 0, 0),
    _NOTHING,
    _NOTHING.reshape(3, 0),
    0,
    0,
    Transfers(),
)
