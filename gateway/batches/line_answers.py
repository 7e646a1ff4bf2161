"""The answer to one line of a batch: the same life as over HTTP, without a connection, behind all other requests.

Each line has a name of its own in the store (an Idempotency-Key), the same at every gateway: whoever takes a batch over
attaches to what the one before it asked for. What says "try again" is tried again until it says something else.

A chat's way in and back for a line: the same planning, submission and formats as routes have. It knows nothing of
files, turns or shares, which driver.py and service.py have.
"""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from gateway.answers.answer_kinds import CHAT, COMPLETION, RESPONSE, AnswerKind
from gateway.answers.answering import submitted
from gateway.answers.openai_response import Body
from gateway.answers.responses_history import with_history
from gateway.answers.retention import NAME_HEADER, name_digest
from gateway.auth.rate_limits import Account
from gateway.batches.fair_slots import FairSlots
from gateway.batches.lines import BatchLine
from gateway.errors import GatewayError, InternalError, InvalidRequest, RateLimited, Unavailable
from gateway.requests.generation_fields import PRIORITY_HEADER, Timeouts
from gateway.state import GatewayState, RequestContext

logger = logging.getLogger("gateway")

KIND_OF_ENDPOINT: dict[str, AnswerKind] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
}
DETACH_SECONDS = 600.0  # how long a line in flight waits for the next gateway when this one ends
MAX_LIVES = 5  # of a line that is cancelled, as the server does when no gateway came back in time
MAX_PAUSE_SECONDS = 30.0
PARK_SECONDS = 5.0  # a batch whose key may not spend for so long waits without a place among those that are driven

Forget: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LineResult:
    status: int
    body: Body
    request_id: str = field(default_factory=lambda: secrets.token_hex(16))  # the answer's; a refusal has its own
    forget: Forget | None = None  # what the store still has of it


class Later(Exception):
    """The line has no result yet: it is asked again when its batch has its next turn, `seconds` from now at least."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class LineAnswers:
    """The answers to the lines of one batch."""

    def __init__(self, state: GatewayState, batch_id: str, endpoint: str, slots: FairSlots) -> None:
        """`slots`: one a request in flight, of all batches here together."""
        self._state = state
        self._batch_id = batch_id
        self._kind = KIND_OF_ENDPOINT[endpoint]
        self._slots = slots
        self.leaving = asyncio.Event()  # what is not in flight is not begun
        self.is_withdrawing = False  # what is left in flight is cancelled, not kept for the next gateway

    async def answer(self, line: BatchLine, account: Account) -> LineResult:
        """Raises Later."""
        num_lives = num_refusals = 0
        while True:
            try:
                async with self._slots.held(account.owner_key_hash):
                    self._check_turn()
                    return await self._ask(line, account)
            except RateLimited as error:
                if error.retry_after_seconds >= PARK_SECONDS:
                    raise Later(error.retry_after_seconds) from error
                pause_seconds = float(error.retry_after_seconds)
            except GatewayError as error:
                if error.code == "request_cancelled" and num_lives < MAX_LIVES:
                    num_lives += 1  # under the same name, as that of no answer is free
                    continue
                if not _is_for_later(error):
                    return _refused(error)
                pause_seconds = getattr(error, "retry_after_seconds", 1.0) * 2 ** min(num_refusals, 5)
                num_refusals += 1
            except Later:
                raise
            except Exception:
                logger.exception("a line of a batch failed")
                return _refused(InternalError())
            await self._pause(min(MAX_PAUSE_SECONDS, pause_seconds))

    def _check_turn(self) -> None:
        if self.leaving.is_set():
            raise Later

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.leaving.wait()
        self._check_turn()

    async def _ask(self, line: BatchLine, account: Account) -> LineResult:
        account.begin(generates=True)
        name = f"{self._batch_id}-{line.number}-0"  # 0: releases before this one had a name a life
        context = RequestContext(
            self._state,
            account,
            {NAME_HEADER: name, PRIORITY_HEADER: "batch"},
            Timeouts(0, 0),  # the defaults are for those who wait
            DETACH_SECONDS,
            for_batch=True,
        )

        body = await context.read(len(line.body), partial(self._kind.decode, line.body))
        if "stream" in body.names and body.given["stream"] is True:
            raise InvalidRequest("stream: a batch has no streams; leave it out.", param="stream")
        if self._kind is RESPONSE:
            body = await with_history(context, body)
        submission = await submitted(context, self._kind, body)
        try:
            answered = await submission.collect()
        finally:
            submission.release(is_withdrawn=self.is_withdrawing)
        forget = partial(submission.forget, name_digest(account.owner_key_hash, name))
        return LineResult(200, answered, submission.answer_id, forget)


def _refused(error: GatewayError) -> LineResult:
    return LineResult(error.status, json.dumps(error.body()).encode())


def _is_for_later(error: GatewayError) -> bool:
    # Its own time in the queue is over for good: the name stands for that end.
    return isinstance(error, Unavailable) and error.code != "queue_timeout"
