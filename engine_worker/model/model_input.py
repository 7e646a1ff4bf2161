"""The input of one forward pass besides the weights and the KV pool.

T = tokens of the step, all sequences concatenated; S = sequences; B = longest block table of the
step; G = groups of layers, each with its blocks.
"""

from dataclasses import dataclass

import torch

from kernels.recurrent.batch import DraftedStates


@dataclass(slots=True, frozen=True)
class DraftedRows:
    """The rows of recurrent layers that know drafts: a sequence has its tokens and drafts in its last row."""

    query_start_loc: torch.Tensor  # [S + 1] int32
    states: DraftedStates


@dataclass(slots=True, frozen=True)
class ModelInput:
    """Tensors and bounds of one step."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position of each token in its sequence
    slot_mapping: torch.Tensor  # [G, T] int64, block_id * block_size + offset: destination of the token's K and V
    query_start_loc: torch.Tensor  # [S + 1] int32, start of each sequence's tokens in T
    seq_lens: torch.Tensor  # [S] int32, tokens in the cache including this step's
    block_tables: torch.Tensor  # [G, S, B] int32, padded with block 0
    logits_indices: torch.Tensor  # [N] int64, rows of T whose logits are needed
    max_query_len: int
    max_seq_len: int
    lowered: torch.Tensor | None = None  # [T] int64, by how much a position is below the planned one; None: nowhere
    state_blocks: torch.Tensor | None = None  # [S] int32, blocks of recurrent states; None: the model has none
    drafted_rows: DraftedRows | None = None  # None: recurrent states know no drafts
    max_joined: int = 1  # the most rows of one token that may belong to one sequence: a token and its drafts
