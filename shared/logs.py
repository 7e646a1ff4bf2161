"""Logs on stderr, as text or JSON. Every line contains the id of the request that it is about.

`request_id` is a context variable: set it at the start of a request, and its task and child tasks log it. Third-party
loggers are limited to WARNING. Never log prompts, outputs, or keys.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

request_id: ContextVar[str] = ContextVar("request_id", default="")

_RECORD = logging.LogRecord("", 0, "", 0, "", (), None)
_STANDARD_ATTRIBUTES = frozenset(vars(_RECORD)) | {"message", "asctime", "taskName"}
_CHATTY_LIBRARIES = ("asyncio", "aiohttp.access", "redis", "urllib3", "matplotlib")


def configure_logging(log_format: str = "text", level: int | str = logging.INFO) -> None:
    """Replace all handlers of the root logger with one on stderr. `log_format` is `text` or `json`."""
    formatters: dict[str, logging.Formatter] = {"text": TextFormatter(), "json": JsonFormatter()}
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatters[log_format])
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, message, request_id if set, `extra` fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _utc_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            entry["request_id"] = request_id.get()
        entry.update(_extra_fields(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO worker: message key=value [request_id]`."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {key}={value}" for key, value in _extra_fields(record).items())
        request = f" [{request_id.get()}]" if request_id.get() else ""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname} {record.name}: {record.getMessage()}{extra}{request}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _utc_time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD_ATTRIBUTES}
