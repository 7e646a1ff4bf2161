"""First come, first served: the queue's order, also after put_back and remove."""

import pytest

from engine_worker.scheduling.policy import FirstComeFirstServed
from engine_worker.scheduling.sequence_group import SequenceGroup
from tests.builders import make_sequence


def test_order_of_admission() -> None:
    policy = FirstComeFirstServed()
    first, second, third, preempted = (SequenceGroup([make_sequence()]) for _ in range(4))
    for group in (first, second, third):
        policy.add(group)
    policy.put_back(preempted)
    policy.remove(second.request_id)
    policy.remove("unknown")
    assert policy.first() is preempted
    assert [policy.pop_first() for _ in range(len(policy))] == [preempted, first, third]
    assert policy.first() is None


def running_sequences(*num_preemptions: int) -> dict[str, SequenceGroup]:
    """In order of admission; none has got a token since it was preempted."""
    running = {}
    for number in num_preemptions:
        sequence = make_sequence()
        sequence.num_preemptions, sequence.num_tokens_when_preempted = number, sequence.num_tokens
        running[sequence.request_id] = SequenceGroup([sequence])
    return running


@pytest.mark.parametrize(
    ("num_preemptions", "needing", "victim"),
    [
        ((0, 0, 0), 0, 2),  # the newest
        ((0, 0, 1), 0, 2),
        ((0, 0, 2), 0, 1),  # the newest is pinned
        ((0, 2, 2), 0, 2),  # all that are newer are
        ((0, 0, 2), 1, 2),  # nobody yields to one that is newer
        ((0, 0, 0), 2, 2),  # itself
        ((2, 2, 2), 2, 2),
    ],
)
def test_who_yields(num_preemptions: tuple[int, ...], needing: int, victim: int) -> None:
    running = running_sequences(*num_preemptions)
    in_order = list(running.values())
    assert in_order.index(FirstComeFirstServed().choose_victim(running, in_order[needing])) == victim


def test_interactive_requests_come_before_a_batch() -> None:
    policy = FirstComeFirstServed()
    line, chat, other = (
        SequenceGroup([make_sequence()], is_background=is_background) for is_background in (True, False, False)
    )
    for group in (line, chat, other):
        policy.add(group)
    assert list(policy) == [chat, other, line] and policy.num_interactive == 2 and policy.get(line.request_id) is line
    policy.put_back(preempted := SequenceGroup([make_sequence()], is_background=True))
    assert [policy.pop_first() for _ in range(4)] == [chat, other, preempted, line]


@pytest.mark.parametrize(
    ("classes", "num_preemptions", "needing", "victim"),
    [
        ("bibi", (0, 0, 0, 0), 1, 2),  # the newest of the batch, not the newest
        ("biii", (0, 0, 0, 0), 3, 0),  # also an older one
        ("bib", (0, 0, 2), 1, 0),  # the newest of the batch is pinned
        ("bib", (2, 0, 2), 1, 2),  # all of it is
        ("biii", (2, 0, 0, 0), 1, 3),
        ("bibi", (0, 0, 0, 0), 0, 2),  # nobody interactive yields to a batch
        ("bi", (0, 0), 0, 0),  # itself
    ],
)
def test_a_batch_yields_first(classes: str, num_preemptions: tuple[int, ...], needing: int, victim: int) -> None:
    running = running_sequences(*num_preemptions)
    in_order = list(running.values())
    for group, kind in zip(in_order, classes, strict=True):
        group.is_background = kind == "b"
    assert in_order.index(FirstComeFirstServed().choose_victim(running, in_order[needing])) == victim


def test_a_token_more_unpins() -> None:
    running = running_sequences(0, 0, 2)
    first, _, newest = running.values()
    newest.sequences[0].output_token_ids.append(1)
    assert FirstComeFirstServed().choose_victim(running, first) is newest
