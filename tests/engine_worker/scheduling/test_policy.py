"""The scheduling policy: admission order and preemption victims within tenants, between tenants, between classes."""

import pytest

from engine_worker.scheduling.policy import FairShare
from engine_worker.scheduling.running_slots import RunningSlots, Tenant
from engine_worker.scheduling.sequence_group import SequenceGroup
from tests.builders import make_sequence


def make_group(
    tenant: str = "", *, is_background: bool = False, weight: float = 1.0, max_running: int = 0
) -> SequenceGroup:
    return SequenceGroup([make_sequence()], is_background=is_background, tenant=Tenant(tenant, weight, max_running))


class Running:
    """A policy and its running groups in order of admission; none has a new token since its preemption."""

    def __init__(self) -> None:
        self.slots = RunningSlots(64)
        self.policy = FairShare(self.slots)
        self.groups: dict[str, SequenceGroup] = {}

    def run(self, group: SequenceGroup, num_preemptions: int = 0) -> SequenceGroup:
        (sequence,) = group.sequences
        sequence.num_preemptions, sequence.num_tokens_when_preempted = num_preemptions, sequence.num_tokens
        group.activate(sequence)
        self.slots.take(group.tenant, group.num_slots, is_background=group.is_background)
        self.groups[group.request_id] = group
        return group

    def victim(self, needing: int) -> int:
        in_order = list(self.groups.values())
        return in_order.index(self.policy.choose_victim(self.groups, in_order[needing]))


def order(policy: FairShare) -> list[SequenceGroup]:
    return [*policy.candidates(is_background=False), *policy.candidates(is_background=True)]


def test_policy_order_is_preempted_then_arrival() -> None:
    policy = Running().policy
    first, second, third, preempted = (make_group() for _ in range(4))
    for group in (first, second, third):
        policy.add(group)
    policy.put_back(preempted)
    policy.remove(second)
    assert order(policy) == [preempted, first, third]
    assert len(policy) == 3 and policy.get(second.request_id) is None


@pytest.mark.parametrize(
    ("num_preemptions", "needing", "victim"),
    [
        ((0, 0, 0), 0, 2),  # the newest
        ((0, 0, 1), 0, 2),
        ((0, 0, 2), 0, 1),  # the newest is pinned
        ((0, 2, 2), 0, 2),  # all newer groups are pinned
        ((0, 0, 2), 1, 2),  # no group is preempted for a newer one
        ((0, 0, 0), 2, 2),  # itself
        ((2, 2, 2), 2, 2),
    ],
)
def test_policy_victim_is_newest_unpinned_group(num_preemptions: tuple[int, ...], needing: int, victim: int) -> None:
    running = Running()
    for number in num_preemptions:
        running.run(make_group(), number)
    assert running.victim(needing) == victim


def test_policy_interactive_precedes_batch() -> None:
    policy = Running().policy
    line, chat, other = (make_group(is_background=is_background) for is_background in (True, False, False))
    for group in (line, chat, other):
        policy.add(group)
    assert list(policy) == [chat, other, line] and policy.num_interactive == 2 and policy.get(line.request_id) is line
    policy.put_back(preempted := make_group(is_background=True))
    assert order(policy) == [chat, other, preempted, line]


@pytest.mark.parametrize(
    ("classes", "num_preemptions", "needing", "victim"),
    [
        ("bibi", (0, 0, 0, 0), 1, 2),  # the newest batch group, not the newest group
        ("biii", (0, 0, 0, 0), 3, 0),  # also an older one
        ("bib", (0, 0, 2), 1, 0),  # the newest batch group is pinned
        ("bib", (2, 0, 2), 1, 2),  # all batch groups are pinned
        ("biii", (2, 0, 0, 0), 1, 3),
        ("bibi", (0, 0, 0, 0), 0, 2),  # no interactive group is preempted for a batch group
        ("bi", (0, 0), 0, 0),  # itself
    ],
)
def test_policy_victim_is_batch_before_interactive(
    classes: str, num_preemptions: tuple[int, ...], needing: int, victim: int
) -> None:
    running = Running()
    for kind, number in zip(classes, num_preemptions, strict=True):
        running.run(make_group(is_background=kind == "b"), number)
    assert running.victim(needing) == victim


def test_policy_new_token_unpins_group() -> None:
    running = Running()
    for number in (0, 0, 2):
        newest = running.run(make_group(), number)
    newest.sequences[0].output_token_ids.append(1)
    assert running.victim(0) == 2


@pytest.mark.parametrize(
    ("tenants", "needing", "victim"),
    [
        ("aaab", 0, 2),  # a keeps two without its newest; b would keep none
        ("aaab", 3, 2),  # an older group of the tenant above its share is preempted for a newer one
        ("aabb", 0, 3),  # equal: the newest
        ("abab", 2, 3),
        ("bbaaa", 1, 4),
    ],
)
def test_policy_victim_is_of_tenant_most_above_share(tenants: str, needing: int, victim: int) -> None:
    running = Running()
    for tenant in tenants:
        running.run(make_group(tenant))
    assert running.victim(needing) == victim


def test_policy_admits_tenants_by_share() -> None:
    running = Running()
    for tenant in "aab":
        running.run(make_group(tenant))
    waiting = [make_group(tenant, weight=weight) for tenant, weight in (("a", 1), ("a", 1), ("b", 1), ("c", 4))]
    for group in waiting:
        running.policy.add(group)
    assert order(running.policy) == [waiting[3], waiting[2], waiting[0], waiting[1]]


@pytest.mark.parametrize(
    ("held", "weight", "yields"),
    [
        ((0, 1), 1.0, False),  # the only group of its tenant would wait in turn
        ((0, 2), 1.0, True),
        ((1, 2), 1.0, False),
        ((31, 33), 1.0, True),
        ((32, 32), 1.0, False),
        ((20, 12), 2.0, True),  # with twice the weight, 21 count as 10.5
        ((22, 12), 2.0, False),
    ],
)
def test_policy_tenant_below_share_takes_a_slot(held: tuple[int, int], weight: float, yields: bool) -> None:
    running = Running()
    for tenant, count in zip("ba", held, strict=True):
        for _ in range(count):
            newest = running.run(make_group(tenant, weight=weight if tenant == "b" else 1.0))
    victim = running.policy.choose_for_share(running.groups, make_group("b", weight=weight))
    assert victim is (newest if yields else None)


def test_policy_skips_tenant_at_its_limit() -> None:
    running = Running()
    running.run(make_group("a", max_running=1))
    waiting = [make_group("a", max_running=1), make_group("b")]
    for group in waiting:
        running.policy.add(group)
    assert list(running.policy.candidates(is_background=False)) == waiting[1:]
    assert running.policy.num_ready(is_background=False) == 1
