"""Logprobs of a row have the same bits alone and in a batch, so that a takeover repeats them exactly."""

from collections.abc import Iterator

import pytest
import torch

from engine_worker.execution.sampling.logprobs import launch_logprobs
from engine_worker.execution.sampling.sampling_inputs import LogprobRows
from shared.messages import TokenLogprobs

NUM_ROWS, VOCAB_SIZE = 64, 49152  # above 32,768 elements, where torch splits one sum among threads
NUM_TOP, NAMED = 3, (7, 4711)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, named: tuple[int, ...]) -> list[TokenLogprobs | None]:
    count = len(logits)
    names = torch.tensor([named] * count) if named else None
    asked = LogprobRows(torch.arange(count), [NUM_TOP] * count, [named] * count, names)
    return launch_logprobs(logits, token_ids, asked).to_host().per_row(count)


@pytest.mark.parametrize("named", [(), NAMED])
def test_logprobs_row_has_same_bits_alone_and_in_batch(named: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)
    token_ids = torch.randint(VOCAB_SIZE, (NUM_ROWS,), generator=generator)
    alone = [logprobs_of(logits[row : row + 1], token_ids[row : row + 1], named)[0] for row in range(NUM_ROWS)]
    assert logprobs_of(logits, token_ids, named) == alone


def test_logprobs_equal_log_softmax_chosen_token_leads_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, -torch.inf]])
    expected = logits.log_softmax(dim=-1)[0].tolist()
    answer = logprobs_of(logits, torch.tensor([2]), ())[0]
    assert answer == TokenLogprobs(expected[2], (2, 1, 3), (expected[2], expected[1], expected[3]))
