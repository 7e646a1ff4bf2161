"""CUDA graph sizes and the graph selected for a batch. test_cuda_runner.py tests the graphs themselves."""

from itertools import pairwise
from typing import cast

import pytest

from engine_worker.execution.settings import CUDAGRAPH_MODES, StepBounds
from engine_worker.execution.step.cuda_graphs import (
    GraphInputs,
    GraphKey,
    StepGraphs,
    decode_sizes,
    graph_keys,
    mixed_sizes,
)
from engine_worker.execution.step.describe import StepDescriber
from engine_worker.execution.step.step_description import StepDescription
from engine_worker.model.devices import Device
from engine_worker.model.network import Network
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine_worker.settings import WorkerSettings
from shared.settings import options
from tests.builders import make_sequence


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_decode_sizes_end_at_max_num_seqs(max_num_seqs: int, expected: list[int]) -> None:
    assert decode_sizes(max_num_seqs) == expected


def test_graph_sizes_grow_in_bounded_steps() -> None:
    sizes = decode_sizes(1024)
    assert (len(sizes), sizes[:5], sizes[-2:]) == (67, [1, 2, 4, 8, 16], [992, 1024])
    assert max(after - before for before, after in pairwise(sizes)) == 32
    assert mixed_sizes(bounds(1024)) == [16, *range(32, 513, 32), *range(576, 1025, 64)]
    assert mixed_sizes(bounds(256)) == [16, *range(32, 513, 32)]
    assert mixed_sizes(StepBounds(max_num_seqs=1024, max_num_batched_tokens=100)) == [16, 32, 64, 96, 100]


def bounds(max_num_seqs: int) -> StepBounds:
    return StepBounds(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192)


def graphs(max_num_seqs: int, mode: str = "full") -> StepGraphs:
    keys = graph_keys(mode, bounds(max_num_seqs))
    return StepGraphs(cast(Network, None), cast(Device, None), cast(GraphInputs, None), keys, max_seq_len=64)


def batch(*num_new_tokens: int, samples: bool = True) -> StepDescription:
    sequences = [make_sequence(600) for _ in num_new_tokens]
    for sequence in sequences:
        sequence.kv.tables[0].blocks = list(range(1, 40))
    scheduled = [
        ScheduledSequence(*row, samples) for row in zip(sequences, [0] * len(sequences), num_new_tokens, strict=True)
    ]
    return StepDescriber(16, decodes_first=False).describe(ScheduledBatch(scheduled))


@pytest.mark.parametrize(
    ("num_new_tokens", "expected"),
    [
        ([1], GraphKey(1, mixed=False)),
        ([1] * 3, GraphKey(4, mixed=False)),
        ([1] * 17, GraphKey(20, mixed=False)),
        ([1] * 21, None),
        ([2], GraphKey(16, mixed=True)),
        ([1] * 9 + [55], GraphKey(64, mixed=True)),
        ([1] * 9 + [56], GraphKey(96, mixed=True)),
        ([512], GraphKey(512, mixed=True)),
        ([1, 512], None),
    ],
    ids=str,
)
def test_graph_key_is_next_size_or_none(num_new_tokens: list[int], expected: GraphKey | None) -> None:
    assert graphs(20).key_for(batch(*num_new_tokens)) == expected


def test_graph_key_considers_number_of_logits() -> None:
    many = graphs(1024)
    assert many.key_for(batch(*[1] * 255, 100)) == GraphKey(384, mixed=True)
    assert many.key_for(batch(*[1] * 256, 100)) == GraphKey(576, mixed=True)
    assert many.key_for(batch(*[1] * 256, 100, samples=False)) == GraphKey(384, mixed=True)
    assert many.key_for(batch(*[1] * 900, 100)) == GraphKey(1024, mixed=True)
    assert many.key_for(batch(*[1] * 900, 125)) is None
    assert many.key_for(batch(*[1] * 100, 500)) is None, "only few of these rows need logits"
    assert graphs(256).key_for(batch(*[1] * 256, 100)) is None


def test_cudagraph_modes_select_graph_keys() -> None:
    (field,) = (field for field in options(WorkerSettings) if field.name == "cudagraph_mode")
    assert field.metadata["choices"] == CUDAGRAPH_MODES
    keys = {mode: graph_keys(mode, bounds(1024)) for mode in CUDAGRAPH_MODES}
    assert keys["none"] == [] and len(keys["full"]) > len(keys["full_decode_only"]) > 0
    decodes_only = graphs(20, "full_decode_only")
    assert decodes_only.key_for(batch(1, 1)) == GraphKey(2, mixed=False)
    assert decodes_only.key_for(batch(1, 2)) is None


def test_graph_key_counts_logits_of_forks_without_tokens() -> None:
    assert graphs(20).key_for(batch(10, 0, 0)) == GraphKey(16, mixed=True)
    assert graphs(20).key_for(batch(1, 0, 0)) is None  # three logits exceed a graph of one token
