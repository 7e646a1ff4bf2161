"""Histogram buckets of durations, and snapshots that later counts do not change."""

from engine_worker.kv.kv_durations import DurationCounts, KVDurations


def test_duration_equal_to_bound_is_in_its_bucket() -> None:
    found = DurationCounts((1.0, 2.0))
    for seconds in (0.0, 1.0, 1.5, 2.0, 2.5, 99.0):
        found.add(seconds)
    assert (found.counts, found.sum_seconds) == ([2, 2, 2], 106.0)


def test_duration_snapshot_is_unaffected_by_later_counts() -> None:
    durations = KVDurations()
    durations.active.add(0.5)
    durations.swap_in.add(0.25)
    snapshot = durations.copy()
    durations.active.add(0.5)
    durations.swap_in.add(0.5)
    assert (sum(snapshot.active.counts), snapshot.swap_in.sum_seconds) == (1, 0.25)
    assert (sum(snapshot.cached.counts), sum(snapshot.swap_out.counts)) == (0, 0)
