from bench.engine.table import comparison


def test_medians_stand_beside_the_peers_with_their_ratio() -> None:
    ours = [{"what": "decode_itl", "batch": 8, "prompt": 1024, "mean_ms": value} for value in (4.0, 5.0, 4.5)]
    peer = [{"what": "decode_itl", "batch": 8, "prompt": 1024, "mean_ms": 5.0}]
    header, line = comparison(ours, peer).splitlines()
    assert header.split() == ["case", "ours", "peer", "ratio", "each", "of", "ours"]
    assert " ".join(line.split()) == "decode ITL ms 8 x 1024 4.50 5.00 0.900 4.00 5.00 4.50 (less is better)"


def test_a_case_without_a_peer_is_shown_alone_and_one_of_the_peer_alone_is_not() -> None:
    ours = [{"what": "throughput_trace", "temperature": 0.0, "req_s": 60.0}]
    peer = [{"what": "throughput_trace", "temperature": 1.0, "req_s": 50.0}]
    _, line = comparison(ours, peer).splitlines()
    assert " ".join(line.split()) == "req/s trace, greedy 60.00 - - 60.00 (more is better)"


def test_a_row_without_its_figure_is_left_out() -> None:
    assert len(comparison([{"what": "decode_itl", "batch": 8, "prompt": 1024}], []).splitlines()) == 1
