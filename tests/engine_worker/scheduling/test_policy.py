"""First come, first served: the queue's order, also after put_back and remove."""

from engine_worker.scheduling.policy import FirstComeFirstServed
from tests.builders import make_sequence


def test_order_of_admission() -> None:
    policy = FirstComeFirstServed()
    first, second, third, preempted = (make_sequence() for _ in range(4))
    for sequence in (first, second, third):
        policy.add(sequence)
    policy.put_back(preempted)
    policy.remove(second.request_id)
    policy.remove("unknown")
    assert policy.first() is preempted
    assert [policy.pop_first() for _ in range(len(policy))] == [preempted, first, third]
    assert policy.first() is None


def test_the_newest_running_sequence_yields() -> None:
    running = {sequence.request_id: sequence for sequence in (make_sequence() for _ in range(3))}
    assert FirstComeFirstServed().choose_victim(running) is list(running.values())[-1]
