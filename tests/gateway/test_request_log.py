"""A flood of refusals has one log line per second and code; successes have one each."""

import logging

import pytest

from gateway.http.request_log import RequestLog


def test_flood_of_one_code_has_a_line_per_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gateway")
    now = 0.0
    log = RequestLog(clock=lambda: now)
    for number in range(1000):
        now = number / 500  # two seconds
        log.write("POST", "/v1/completions", "429", 0.0)
    log.write("POST", "/v1/completions", "503", 0.0)
    assert [record.getMessage()[-3:] for record in caplog.records] == ["429", "429", "503"]
    assert [getattr(record, "others", 0) for record in caplog.records] == [0, 499, 0]


def test_answers_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gateway")
    log = RequestLog(clock=lambda: 0.0)
    for _ in range(3):
        log.write("POST", "/v1/completions", "200", 0.0)
        log.write("GET", "/metrics", "200", 0.0)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.DEBUG] * 3
