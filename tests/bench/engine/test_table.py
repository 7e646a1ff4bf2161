"""Table of the engine benchmark beside its peers."""

from bench.engine.table import comparison


def test_table_shows_medians_peers_and_ratios() -> None:
    ours = [{"what": "decode_itl", "batch": 8, "prompt": 1024, "mean_ms": value} for value in (4.0, 5.0, 4.5)]
    peer = [{"what": "decode_itl", "batch": 8, "prompt": 1024, "mean_ms": 5.0}]
    header, line = comparison(ours, peer).splitlines()
    assert header.split() == ["case", "ours", "peer", "ratio", "each", "of", "ours"]
    assert " ".join(line.split()) == "decode ITL ms 8 x 1024 4.50 5.00 0.900 4.00 5.00 4.50 (less is better)"


def test_case_without_a_peer_has_no_ratio() -> None:
    ours = [{"what": "throughput_trace", "temperature": 0.0, "req_s": 60.0}]
    peer = [{"what": "throughput_trace", "temperature": 1.0, "req_s": 50.0}]
    _, line = comparison(ours, peer).splitlines()
    assert " ".join(line.split()) == "req/s trace, greedy 60.00 - - 60.00 (more is better)"


def test_row_without_a_figure_is_omitted() -> None:
    assert len(comparison([{"what": "decode_itl", "batch": 8, "prompt": 1024}], []).splitlines()) == 1
