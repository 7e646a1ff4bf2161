"""Log-probabilities of a row are the same bits alone and among others: a takeover tells what was told before."""

from collections.abc import Iterator

import pytest
import torch

from engine_worker.execution.logprobs import launch_logprobs
from engine_worker.execution.sampling_inputs import LogprobRows
from shared.messages import TokenLogprobs

NUM_ROWS, VOCAB_SIZE = 64, 49152  # more than the 32,768 elements from which on torch shares one sum out among threads
NUM_TOP, NAMED = 3, (7, 4711)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def told(logits: torch.Tensor, token_ids: torch.Tensor, named: tuple[int, ...]) -> list[TokenLogprobs | None]:
    count = len(logits)
    names = torch.tensor([named] * count) if named else None
    asked = LogprobRows(torch.arange(count), [NUM_TOP] * count, [named] * count, names)
    return launch_logprobs(logits, token_ids, asked).to_host().per_row(count)


@pytest.mark.parametrize("named", [(), NAMED])
def test_a_row_has_the_same_bits_alone_and_among_others(named: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)
    token_ids = torch.randint(VOCAB_SIZE, (NUM_ROWS,), generator=generator)
    alone = [told(logits[row : row + 1], token_ids[row : row + 1], named)[0] for row in range(NUM_ROWS)]
    assert told(logits, token_ids, named) == alone


def test_they_are_the_log_softmax_and_the_chosen_token_leads_its_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, -torch.inf]])
    expected = logits.log_softmax(dim=-1)[0].tolist()
    answer = told(logits, torch.tensor([2]), ())[0]
    assert answer == TokenLogprobs(expected[2], (2, 1, 3), (expected[2], expected[1], expected[3]))
