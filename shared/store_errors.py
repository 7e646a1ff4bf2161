"""The meaning of each error of the store for its caller: one table, and the back-off of retries.

Callers retry only what is safe: scripts and reads. If no retry can help, StoreRetry raises. If an operator must act,
the error is StoreRefused, whose message says what to do.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from redis import exceptions

MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 1.0  # tokens flow at most 2 s after the store accepts writes again
# A proxy may route to the old primary until its next health check; the address of a replica is always wrong.
REPLICA_AT_START_SECONDS = 5.0
MOVED_SECONDS = 60.0  # until the nodes of a cluster report where a slot is
ROTATION_SECONDS = 60.0  # time in which the store's password and this process's file may differ


class Outcome(Enum):
    REFUSED = "refused"  # nothing was applied: repeat
    UNKNOWN = "unknown"  # it may have been applied: repeat by the script's rule
    FINAL = "final"  # a retry cannot help


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table.

    Attributes:
        outcome: What is known about the command.
        closes_connections: Whether the open connections lead to a server that is no longer the primary.
        seconds_at_start: Time limit of retries before the first success.
        seconds_running: Time limit of retries after a success.
        advice: What an operator must do when the retries end; empty for a programming error.
    """

    outcome: Outcome
    closes_connections: bool = False
    seconds_at_start: float = math.inf
    seconds_running: float = math.inf
    advice: str = ""


class StoreRefused(Exception):
    """The store cannot be used as it is configured; the message says what to change."""


_REFUSED = Rule(Outcome.REFUSED)
_NO_REPLY = Rule(Outcome.UNKNOWN)
_NO_REPLY_IN_TIME = Rule(Outcome.UNKNOWN, closes_connections=True)
_FINAL = Rule(Outcome.FINAL)
_CLUSTER_ADVICE = "the store is a node of a cluster; give its address as redis+cluster://HOST:PORT"
_CREDENTIALS = Rule(
    Outcome.REFUSED,
    seconds_at_start=0.0,
    seconds_running=ROTATION_SECONDS,
    advice="the store refuses this user; check user name, password and permissions",
)

# By the first word of the server's reply.
RULES = {
    **dict.fromkeys(("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"), _REFUSED),
    **dict.fromkeys(("OOM", "MISCONF", "BUSY", "NOREPLICAS"), _REFUSED),
    "ASK": _REFUSED,  # until the slot has moved
    "READONLY": Rule(
        Outcome.REFUSED,
        closes_connections=True,
        seconds_at_start=REPLICA_AT_START_SECONDS,
        advice="the store is a read-only replica; give the address of the primary",
    ),
    "UNBLOCKED": Rule(Outcome.UNKNOWN, closes_connections=True),  # a blocking read at a primary that was demoted
    "MOVED": Rule(  # the slot has another primary, which a cluster's nodes report
        Outcome.REFUSED,
        closes_connections=True,
        seconds_at_start=REPLICA_AT_START_SECONDS,
        seconds_running=MOVED_SECONDS,
        advice=_CLUSTER_ADVICE,
    ),
    "CROSSSLOT": Rule(Outcome.FINAL, advice=_CLUSTER_ADVICE),
    **dict.fromkeys(("NOAUTH", "WRONGPASS", "NOPERM"), _CREDENTIALS),
    "EXECABORT": _REFUSED,
}

# redis-py removes the first word from the messages of these classes. Subclasses come first.
_CODES = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.MovedError: "MOVED",
    exceptions.AskError: "ASK",
    exceptions.ClusterCrossSlotError: "CROSSSLOT",
    exceptions.AuthenticationError: "WRONGPASS",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.ExecAbortError: "EXECABORT",
}

_OF_PIPELINE = " of pipeline caused error: "  # redis-py's text before the reply, which is then a quoted tuple


def rule_of(error: BaseException) -> Rule:
    """Return the rule of an exception of redis-py or of the socket."""
    code = code_of(error)
    if code == "EXECABORT":  # "Transaction discarded because of: NOPERM ..."
        cause = RULES.get(str(error).rpartition("because of: ")[2].partition(" ")[0])
        return cause or _REFUSED
    if code in RULES:
        return RULES[code]
    if isinstance(error, exceptions.TimeoutError | TimeoutError):
        return _NO_REPLY_IN_TIME
    return _NO_REPLY if isinstance(error, exceptions.ConnectionError | OSError) else _FINAL


def code_of(error: BaseException) -> str:
    """Return the first word of the server's reply; empty if the error is not a reply."""
    code = next((code for error_class, code in _CODES.items() if isinstance(error, error_class)), "")
    if not code and isinstance(error, exceptions.ResponseError):
        reply = str(error).rpartition(_OF_PIPELINE)[2].lstrip("('\"")
        return reply.partition(" ")[0]
    return code


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed."""
    return rule_of(error).outcome is not Outcome.FINAL


def got_no_reply(error: BaseException) -> bool:
    """Return whether the command may have been applied."""
    return rule_of(error).outcome is Outcome.UNKNOWN


class Backoff:
    """Delays that double from MIN_BACKOFF_SECONDS to MAX_BACKOFF_SECONDS, until a success."""

    def __init__(self) -> None:
        self._seconds = MIN_BACKOFF_SECONDS

    def reset(self) -> None:
        self._seconds = MIN_BACKOFF_SECONDS

    def next_delay(self) -> float:
        """Return the seconds to wait before the next attempt."""
        delay, self._seconds = self._seconds, min(2 * self._seconds, MAX_BACKOFF_SECONDS)
        return delay


class StoreRetry:
    """The retries of one caller of the store."""

    def __init__(self, *, has_succeeded: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without errors. `has_succeeded`: another caller of this process has already succeeded."""
        self._has_succeeded = has_succeeded
        self._clock = clock
        self._backoff = Backoff()
        self._code = ""  # of the current series of equal errors
        self._first_at = 0.0  # time of its first error

    def succeeded(self) -> None:
        self._has_succeeded = True
        self._code = ""
        self._backoff.reset()

    def delay_after(self, error: Exception) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            StoreRefused: If an operator must act.
            Exception: `error` itself, if it is final and means a programming error.
        """
        rule, code = rule_of(error), code_of(error)
        if code != self._code:
            self._code, self._first_at = code, self._clock()
        patience = rule.seconds_running if self._has_succeeded else rule.seconds_at_start
        if rule.outcome is Outcome.FINAL or self._clock() - self._first_at >= patience:
            if rule.advice:
                raise StoreRefused(f"{rule.advice} (its reply: {_reply(code, error)})") from error
            raise error
        return self._backoff.next_delay()


def _reply(code: str, error: Exception) -> str:
    text = str(error)
    return text if text.startswith(code) else f"{code} {text}"
