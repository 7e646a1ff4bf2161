"""Which batch sizes are captured, and which of them serves a batch. The graphs themselves: test_cuda_runner.py."""

from itertools import pairwise
from typing import cast

import pytest

from engine_worker.execution.cuda_graphs import DecodeGraphs, GraphInputs, graph_sizes
from engine_worker.model.transformer import Device, Transformer


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_sizes_end_with_the_most_sequences_there_are(max_num_seqs: int, expected: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == expected


def test_sizes_of_many_sequences() -> None:
    sizes = graph_sizes(1024)
    assert (len(sizes), sizes[:5], sizes[-2:]) == (51, [1, 2, 4, 8, 16], [496, 512])
    assert max(after - before for before, after in pairwise(sizes)) == 16


def test_the_next_size_serves_and_none_beyond_the_last() -> None:
    graphs = DecodeGraphs(
        cast(Transformer, None), cast(Device, None), cast(GraphInputs, None), graph_sizes(20), max_seq_len=64
    )
    assert [graphs.size_for(number) for number in (1, 3, 5, 9, 17, 20, 21)] == [1, 4, 8, 16, 20, 20, None]
