"""The input of one forward pass: every tensor that the network needs beside its weights and the KV pool.

T = tokens of this step, all sequences one after another; S = sequences; B = longest block table of the step.

It is made in every step by input_builder.py or persistent_inputs.py, read by the network. It knows no request: rows
are numbers.
"""

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class ModelInput:
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position of each token in its sequence
    slot_mapping: torch.Tensor  # [T] int64, block_id * block_size + offset: where the token's K and V are stored
    query_start_loc: torch.Tensor  # [S + 1] int32, where each sequence's tokens begin in T
    seq_lens: torch.Tensor  # [S] int32, tokens in the cache after this step's are stored
    block_tables: torch.Tensor  # [S, B] int32, padded with block 0
    logits_indices: torch.Tensor  # [N] int64, rows of T whose logits are wanted
    max_query_len: int
    max_seq_len: int
