"""Log lines in JSON and text format."""

import json
import logging
from collections.abc import Iterator

import pytest

from shared import logs
from shared.logs import JsonFormatter, TextFormatter, configure_logging, request_id


@pytest.fixture
def record() -> logging.LogRecord:
    made = logging.LogRecord("gateway", logging.INFO, "f.py", 1, "took %d ms", (7,), None)
    made.created, made.msecs = 1_700_000_000.125, 125.0
    made.status = 200
    return made


@pytest.fixture
def in_request() -> Iterator[None]:
    token = request_id.set("r1")
    yield
    request_id.reset(token)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, loggers = root.handlers[:], [root, *map(logging.getLogger, logs._CHATTY_LIBRARIES)]
    levels = [logger.level for logger in loggers]
    yield root
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_json_line_has_all_fields(record: logging.LogRecord, in_request: None) -> None:
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2023-11-14T22:13:20.125Z", "level": "info", "logger": "gateway", "message": "took 7 ms",
        "request_id": "r1", "status": 200,
    }  # fmt: skip


def test_text_line_has_all_fields(record: logging.LogRecord, in_request: None) -> None:
    assert TextFormatter().format(record).endswith(" INFO gateway: took 7 ms status=200 [r1]")


def test_log_line_outside_request_has_no_request_id(record: logging.LogRecord) -> None:
    assert "request_id" not in json.loads(JsonFormatter().format(record))
    assert TextFormatter().format(record).endswith("status=200")


def test_json_line_with_exception_is_one_line(record: logging.LogRecord) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


def test_library_loggers_are_quiet(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json")
    logging.getLogger("aiohttp.access").info("GET /metrics")
    logging.getLogger("gateway").info("hello")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "hello"
