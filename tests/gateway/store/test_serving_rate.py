"""The rate at which a fleet serves requests: known only under a backlog, after enough of them have ended."""

from typing import Any, cast

import pytest

from gateway.fleet import Fleet
from gateway.store.serving_rate import MIN_FINISHED, MIN_SECONDS, WINDOW_SECONDS, ServingRate
from shared.messages import WorkerHeartbeat, WorkerPhase


class Site:
    """A fleet of one worker, on a clock that the test controls."""

    def __init__(self) -> None:
        self.now = 100.0
        self.fleet = Fleet(lambda: self.now)
        self.rate = ServingRate(cast(Any, None), cast(Any, None), self.fleet, lambda: self.now)
        self.finished = 0
        self.beat()

    def beat(self, running: int = 4, worker: str = "w.1", finished: int | None = None) -> None:
        self.fleet.record_heartbeat(
            WorkerHeartbeat(
                worker_id=worker,
                phase=WorkerPhase.READY,
                running=running,
                step=int(self.now),
                finished_requests=self.finished if finished is None else finished,
            )
        )

    def run(self, seconds: int, per_second: int, *, is_backlog: bool = True, running: int = 4) -> None:
        for _ in range(seconds):
            self.now += 1
            self.finished += per_second
            self.beat(running)
            self.rate.record(is_backlog=is_backlog)


@pytest.fixture
def site() -> Site:
    return Site()


def test_rate_of_a_backlog_is_that_of_the_fleet(site: Site) -> None:
    site.run(31, per_second=8)
    assert site.rate.per_second() == pytest.approx(8)


def test_rate_is_unknown_without_a_backlog(site: Site) -> None:
    site.run(60, per_second=1, is_backlog=False)
    assert site.rate.per_second() is None
    site.run(30, per_second=8)
    site.run(1, per_second=8, is_backlog=False)
    assert site.rate.per_second() is None


def test_rate_is_unknown_at_first(site: Site) -> None:
    site.run(int(MIN_SECONDS), per_second=MIN_FINISHED)
    assert site.rate.per_second() is None
    site.run(1, per_second=MIN_FINISHED)
    assert site.rate.per_second() == MIN_FINISHED


def test_rate_is_unknown_before_two_generations_have_ended(site: Site) -> None:
    site.run(41, per_second=1, running=32)
    assert site.rate.per_second() is None
    site.run(30, per_second=2, running=32)
    assert site.rate.per_second() is not None


def test_rate_follows_the_last_minute(site: Site) -> None:
    site.run(200, per_second=2)
    site.run(int(WINDOW_SECONDS), per_second=10)
    assert site.rate.per_second() == pytest.approx(10)


def test_a_joining_or_restarted_worker_adds_only_what_it_serves_from_then_on(site: Site) -> None:
    site.beat(worker="w.2", finished=5_000)
    assert site.fleet.num_finished == 0
    site.beat(worker="w.2", finished=5_010)
    site.beat(worker="w.2", finished=0)
    site.beat(worker="w.2", finished=7)
    assert site.fleet.num_finished == 17
