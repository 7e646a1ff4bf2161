"""The ring buffer of KV events: fields, lost events, and durations that are measured later."""

from engine_worker.kv.kv_events import RING_EVENTS, KVEventKind, KVEventLog

SWAP_OUT, SWAP_IN, EVICT = KVEventKind.SWAP_OUT, KVEventKind.SWAP_IN, KVEventKind.EVICT


def record(log: KVEventLog, kind: KVEventKind, step: int, num_blocks: int = 3) -> None:
    log.record(kind, step, request_id="r", reason="why", num_blocks=num_blocks, num_tokens=40)


def test_kv_event_has_all_fields() -> None:
    log = KVEventLog(block_bytes=100, clock=lambda: 12.5)
    record(log, SWAP_OUT, step=7)
    log.measured(7, swap_out_seconds=0.25, swap_in_seconds=0.0)
    assert log.since(0) == {
        "events": [
            {
                "number": 1,
                "step": 7,
                "time_seconds": 12.5,
                "kind": "swap_out",
                "request_id": "r",
                "reason": "why",
                "num_blocks": 3,
                "num_bytes": 300,
                "num_tokens": 40,
                "milliseconds": 250.0,
            }
        ],
        "last": 1,
        "num_lost": 0,
    }


def test_kv_event_duration_matches_step_and_direction() -> None:
    log = KVEventLog()
    for kind, step in ((SWAP_OUT, 1), (SWAP_OUT, 2), (EVICT, 2), (SWAP_IN, 2), (SWAP_OUT, 3)):
        record(log, kind, step)
    log.measured(2, swap_out_seconds=1.0, swap_in_seconds=2.0)
    assert [event["milliseconds"] for event in log.since(0)["events"]] == [None, 1000.0, 1000.0, 2000.0, None]
    assert (log.durations.swap_out.sum_seconds, log.durations.swap_in.sum_seconds) == (1.0, 2.0)
    log.measured(3, swap_out_seconds=0.5, swap_in_seconds=0.0)
    assert (sum(log.durations.swap_out.counts), sum(log.durations.swap_in.counts)) == (2, 1)


def test_kv_events_since_continues_after_a_number() -> None:
    log = KVEventLog()
    for step in range(5):
        record(log, SWAP_OUT, step)
    assert [event["number"] for event in log.since(3)["events"]] == [4, 5]
    assert log.since(5) == {"events": [], "last": 5, "num_lost": 0}
    page = log.since(0, limit=2)
    assert ([event["number"] for event in page["events"]], page["last"]) == ([1, 2], 2)


def test_kv_event_ring_is_bounded_and_counts_lost() -> None:
    log = KVEventLog()
    for step in range(RING_EVENTS + 10):
        record(log, SWAP_OUT, step)
    answer = log.since(4)
    assert (len(answer["events"]), answer["events"][0]["number"], answer["num_lost"]) == (RING_EVENTS, 11, 6)


def test_kv_event_log_empty_has_no_events() -> None:
    assert KVEventLog().since(0) == {"events": [], "last": 0, "num_lost": 0}
