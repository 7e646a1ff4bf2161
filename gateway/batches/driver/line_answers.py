"""The answer to one line of a batch: the path of an HTTP request without a connection, at batch priority.

Each line has a name in the store (an Idempotency-Key) that all drivers derive equally, so the next driver of a batch
attaches to what the previous one submitted. Errors that allow a retry are retried until another result arrives.
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

from gateway.apis.chat.kinds import CHAT
from gateway.apis.completions.kinds import COMPLETION
from gateway.apis.embeddings.kinds import EMBEDDING
from gateway.apis.registry import ALL_KINDS
from gateway.apis.responses.kinds import RESPONSE
from gateway.auth.rate_limits import Account
from gateway.batches.driver.fair_slots import FairSlots
from gateway.batches.driver.lines import BatchLine
from gateway.errors import GatewayError, InternalError, InvalidRequest, RateLimited, Unavailable
from gateway.fleet import Timeouts
from gateway.http.headers import NAME_HEADER
from gateway.http.state import GatewayState
from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.context import RequestContext
from gateway.pipeline.fields import PRIORITY_HEADER
from gateway.pipeline.response_format import Body
from gateway.pipeline.retention import name_digest
from gateway.pipeline.submit import submitted

logger = logging.getLogger("gateway")

KIND_OF_ENDPOINT: dict[str, AnswerKind] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/embeddings": EMBEDDING,
}
DETACH_SECONDS = 600.0  # a line in flight waits this long for another driver when this one stops
MAX_LIVES = 5  # submissions of a line that the server cancels because no driver returned in time
MAX_PAUSE_SECONDS = 30.0
PARK_SECONDS = 5.0  # a batch whose key may not spend for this long gives up its driver slot

Forget: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LineResult:
    status: int
    body: Body
    request_id: str = field(default_factory=lambda: secrets.token_hex(16))  # of the answer, or new for a refusal
    forget: Forget | None = None  # deletes the answer from the store


class Later(Exception):
    """The line has no result yet; it is submitted again in the batch's next time slice, after at least `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class LineAnswers:
    """The answers to the lines of one batch."""

    def __init__(self, state: GatewayState, batch_id: str, endpoint: str, slots: FairSlots) -> None:
        """Create the answers; `slots` limits the requests in flight of all batches in this process."""
        self._state = state
        self._batch_id = batch_id
        self._kind = KIND_OF_ENDPOINT[endpoint]
        self._slots = slots
        self.leaving = asyncio.Event()  # set: start no more lines
        self.is_withdrawing = False  # True: cancel lines in flight instead of keeping them for the next driver

    async def answer(self, line: BatchLine, account: Account) -> LineResult:
        """Answer a line; raise Later if it must wait for the next time slice."""
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
                    num_lives += 1  # the same name may be used again, because no answer holds it
                    continue
                if not _is_for_later(error):
                    return _refused(error)
                pause_seconds = getattr(error, "retry_after_seconds", 1.0) * 2 ** min(num_refusals, 5)
                num_refusals += 1
            except Later:
                raise
            except Exception:
                logger.exception("batch %s: line %d failed", self._batch_id, line.number)
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
        name = f"{self._batch_id}-{line.number}-0"  # earlier releases counted lives in the last part
        context = RequestContext(
            self._state,
            ALL_KINDS,
            account,
            {NAME_HEADER: name, PRIORITY_HEADER: "batch"},
            Timeouts(0, 0),  # the defaults apply to interactive requests only
            DETACH_SECONDS,
            for_batch=True,
        )

        body = await context.read(len(line.body), partial(self._kind.decode, line.body))
        if "stream" in body.names and body.given["stream"] is True:
            raise InvalidRequest("stream: not supported in batches; remove it.", param="stream")
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
    # A queue timeout is final: the line's name refers to that end.
    return isinstance(error, Unavailable) and error.code != "queue_timeout"
