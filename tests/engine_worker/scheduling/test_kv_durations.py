"""Which bucket a duration falls into, and that a snapshot does not change with what is counted later."""

from engine_worker.scheduling.kv_durations import DurationCounts, KVDurations


def test_a_bound_belongs_to_its_bucket() -> None:
    found = DurationCounts((1.0, 2.0))
    for seconds in (0.0, 1.0, 1.5, 2.0, 2.5, 99.0):
        found.add(seconds)
    assert (found.counts, found.sum_seconds) == ([2, 2, 2], 106.0)


def test_a_snapshot_stays_as_it_is() -> None:
    durations = KVDurations()
    durations.active.add(0.5)
    durations.swap_in.add(0.25)
    snapshot = durations.copy()
    durations.active.add(0.5)
    durations.swap_in.add(0.5)
    assert (sum(snapshot.active.counts), snapshot.swap_in.sum_seconds) == (1, 0.25)
    assert (sum(snapshot.cached.counts), sum(snapshot.swap_out.counts)) == (0, 0)
