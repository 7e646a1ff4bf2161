"""One answer for one client: submitted to the engine, streamed or collected, and released.

    await submission.submit()
    try:
        response = await submission.respond(http)  # stream(http), or the body of collect()
    finally:
        submission.release()                       # charges its tokens; withdraws it if no client waits for it

A new answer is an AnswerSubmission. A KeptSubmission attaches to a kept one, and delivers it from its beginning or from
the event where a stream was interrupted.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from aiohttp import web
from msgspec import structs

from gateway.auth.rate_limits import TokenCharge
from gateway.errors import GatewayError, KeyShareExceeded, RateLimited, Unavailable
from gateway.fleet import share_full, starts_late, unavailable
from gateway.http import sse
from gateway.http.event_numbers import END, EventNumbers, first_events
from gateway.http.event_numbers import HEADER as LAST_EVENT_ID
from gateway.http.kept_bodies import BuiltBody, SharedBody
from gateway.http.open_response import OpenResponse
from gateway.metrics import ModelMetrics
from gateway.model_service import ModelService
from gateway.pipeline.answer import Answer
from gateway.pipeline.answer_extras import AnswerExtras
from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.context import RequestContext, context_of
from gateway.pipeline.kept import KeptAnswer
from gateway.pipeline.reply import Delivery
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.response_format import Body, ReplyHeader, ResponseFormat
from gateway.pipeline.retention import listed_names
from gateway.store.inbox import Inbox
from gateway.store.store_calls import (
    NeedsNewerWorker,
    NotReplicated,
    QueueFull,
    QueueShareFull,
    ShareFull,
    StartsLate,
    StoreUnavailable,
)
from shared.messages import GenerationRequest
from shared.new_requests import RetentionTerms

_REFUSALS = {
    QueueFull: "queue_full",
    NeedsNewerWorker: "needs_newer_worker",
    NotReplicated: "store_not_replicated",
    StoreUnavailable: "store_unavailable",
}
# Reserved for a choice without max_tokens: most answers end long before the end of the context.
OPEN_OUTPUT_TOKENS = 1024


class AnswerSubmission:
    """A new answer. It is charged when this gateway releases it, possibly long after its client has left."""

    def __init__(
        self,
        context: RequestContext,
        service: ModelService,
        kind: AnswerKind,
        completion: CompletionRequest,
        requests: Sequence[GenerationRequest],
        created: int,
        *,
        terms_of_each: Sequence[RetentionTerms] = (),
        detach_seconds: float | None = None,
    ) -> None:
        """Prepare the submission of `requests`, one per prompt, `created` in Unix seconds.

        A kept answer has `terms_of_each`, one per prompt, and continues without a reader for `detach_seconds`.

        Raises:
            InvalidRequest: If a stop string or parser does not fit the model.
            Unavailable: If the tokenizer is not loaded.
        """
        self.answer_id = requests[0].request_id
        self._context = context
        self._service = service
        self._model = service.require_model()
        self._kind = kind
        self._completion = completion
        self._requests = requests
        self._prompts = [request.prompt_token_ids for request in requests]
        self._num_prompt_tokens = sum(map(len, self._prompts))
        self._created = created
        self._terms_of_each = terms_of_each
        self._detach_seconds = detach_seconds
        always_uses = context.state.settings.force_include_usage
        self._include_usage = completion.stream and (completion.include_usage or always_uses)
        self._headers = ignored_header(completion.ignored) if completion.ignored else {}
        self._numbers = None
        if detach_seconds is not None:
            self._headers |= {"Content-Location": f"/v1/requests/{self.answer_id}"}
            num_choices = len(completion.prompts) * completion.n
            self._numbers = EventNumbers(num_choices, context.headers.get(LAST_EVENT_ID, ""))
        self._answer: Answer | None = None  # once the store has it
        self._charge: TokenCharge | None = None  # if its key has a limit of tokens

    @property
    def shows_state(self) -> bool:
        """Return whether the response shows the state of a background answer, without waiting for it."""
        completion = self._completion
        return completion.background and not completion.stream and not self._context.for_batch

    async def submit(self) -> None:
        """Submit; call release() afterwards unless this raises Unavailable, RateLimited, or NameTaken."""
        try:
            await self._submit()
        except BaseException:
            self.release()
            raise

    async def _submit(self) -> None:
        account, max_output = self._context.account, self._max_output_tokens()
        self._charge = account.reserve(self._num_prompt_tokens, max_output, self._num_used_tokens)
        metrics = self._service.unrecorded if self._context.for_batch else self._service.metrics
        self._follow(await self._accepted(), metrics)

    async def _accepted(self) -> list[Inbox]:
        """Submit all requests, or none. Raises Unavailable, RateLimited, or NameTaken."""
        rejected, share = self._service.metrics.rejected, self._service.share_of(self._context.account)
        try:
            return await self._service.client.submission.submit_all(self._requests, self._terms_of_each, share)
        except QueueShareFull as error:
            rejected.labels("key_share_exceeded").inc()
            share_now = f"{error.max_places} of {error.num_places}"
            raise KeyShareExceeded("queue places", share_now, "--max-num-queued-reqs") from error
        except StartsLate as error:
            rejected.labels("queue_wait_exceeded").inc()
            raise starts_late(error.num_ahead, error.wait_seconds, error.retry_after_seconds) from error
        except ShareFull as error:
            rejected.labels("store_share").inc()
            raise share_full(error.max_bytes) from error
        except (QueueFull, NeedsNewerWorker, StoreUnavailable) as error:
            reason = _REFUSALS[type(error)]
            rejected.labels(reason).inc()
            raise unavailable(reason) from error

    def _follow(self, streams: Sequence[Inbox], metrics: ModelMetrics, ended_at: int = 0) -> None:
        """Prepare to read the answer. A worker may already have begun."""
        try:
            arrived_at = self._context.arrived_at
            self._answer = Answer(self._service, self._model, self._completion, streams, arrived_at, metrics, ended_at)
        except Exception:
            for stream in streams:  # nobody will read them
                self._service.background.start(self._service.client.submission.release(stream))
            raise

    async def respond(self, http: web.Request) -> web.StreamResponse:
        """Answer as the request body asks: streamed, collected, or with its current state."""
        if self._completion.stream:
            return await self.stream(http)
        body = self._format().unfinished("queued") if self.shows_state else await self.collect()
        return web.Response(body=body, content_type="application/json", headers=self._headers)

    async def stream(self, http: web.Request) -> web.StreamResponse:
        delivery = self._delivery()
        response_format = delivery.response_format
        response = web.StreamResponse(headers={**sse.HEADERS, **self._headers, **response_format.stream_headers})
        opened = OpenResponse(http, response, self._context.state.watch, response_format.keep_alive)
        if delivery.numbers is not None:  # clients can resume it
            opened.is_cut_off = self._service.client.is_cut_off
        return await delivery.stream(opened)

    async def collect(self) -> Body:
        """Return the complete body. Raises the error that the answer ended with."""
        return await self._delivery().collect()

    def release(self, *, is_withdrawn: bool = False) -> None:
        """Release it: a kept answer continues for detach_seconds unless `is_withdrawn`; others are withdrawn now."""
        self._leave(None if is_withdrawn else self._detach_seconds, self._settle)

    async def forget(self, name: str) -> None:
        """Drop what the store keeps of an answer that has ended, and its client's name for it."""
        await self._service.client.archive.forget([request.request_id for request in self._requests], name)

    def _leave(self, grace_seconds: float | None, then: Callable[[], None] | None = None) -> None:
        if self._answer is not None:
            self._answer.leave(grace_seconds, then)
        elif then is not None:
            then()

    def _settle(self) -> None:
        if self._charge is not None:
            self._charge.settle()

    def _num_used_tokens(self) -> int:
        return self._answer.usage.all_tokens if self._answer is not None else 0

    def _max_output_tokens(self) -> int:
        """Return the tokens to reserve for all choices."""
        num_tokens, is_open = 0, self._completion.max_tokens is None
        for request in self._requests:
            limit = request.sampling.max_tokens
            num_tokens += request.sampling.n * (min(limit, OPEN_OUTPUT_TOKENS) if is_open else limit)
        return num_tokens

    def _format(self) -> ResponseFormat:
        return self._kind.format(
            ReplyHeader(
                response_id=self.answer_id,
                model=self._service.name,
                created=self._created,
                prompt_tokens=self._num_prompt_tokens,
                sampling=self._requests[0].sampling,
                repeated=self._completion.repeated,
                system_fingerprint=self._service.fingerprint or self._model.fingerprint,
                usage_in_chunks=self._include_usage,
            )
        )

    def _delivery(self) -> Delivery:
        assert self._answer is not None, "submit"
        response_format, fields, extras = self._format(), self._completion.fields, None
        if fields.return_token_ids or fields.prompt_logprobs is not None:
            extras = AnswerExtras(
                self._completion,
                self._model.encoder,
                self._prompts,
                prompt_in_choice=response_format.prompt_in_choice,
            )
        return Delivery(
            work=self._context.work,
            completion=self._completion,
            answer=self._answer,
            response_format=response_format,
            extras=extras,
            include_usage=self._include_usage,
            numbers=None if response_format.stream_headers else self._numbers,
        )


class KeptSubmission(AnswerSubmission):
    """A kept answer that is sent again.

    It counts as a request with its tokens, except for background answers, which have no other reader.
    """

    def __init__(self, context: RequestContext, kept: KeptAnswer, completion: CompletionRequest | None = None) -> None:
        """Read `kept` again, optionally with other options than those of its body."""
        completion = kept.completion if completion is None else completion
        # Whether the client has the complete answer already.
        self._has_everything = completion.stream and context.headers.get(LAST_EVENT_ID) == END
        if self._has_everything:
            context = replace(context, headers={})
        record = kept.record
        super().__init__(
            context, kept.service, kept.kind, completion, kept.requests, record.created,
            detach_seconds=record.detach_seconds,
        )  # fmt: skip
        self._kept = kept
        self._shared: SharedBody | None = None  # the body, if other clients may read it too

    async def _submit(self) -> None:
        """Attach to the streams. Raises AnswerChanged if the idempotency key now belongs to another answer."""
        if self._has_everything or (self.shows_state and not self._kept.has_result):
            return
        if not self._completion.background:
            self._context.account.check_debt()
        if self._kept.has_result and not self._completion.stream and not self.shows_state:
            name, bodies = (self._kind.name, self.answer_id), self._context.state.kept_bodies
            self._shared = await bodies.get(self._context.account, name, self._built)
        else:
            await self._attach()

    async def _built(self) -> BuiltBody:
        await self._attach()
        return as_built(self._kept, await self.collect())

    async def _attach(self) -> None:
        streams = await self._kept.attach()
        self._follow(streams, self._service.unrecorded, self._kept.ended_at)  # each answer is measured once
        self._kept.check_unchanged(streams)

    async def collect(self) -> Body:
        """Return the complete body, which submit() has built already if it is shared with other readers."""
        return await super().collect() if self._shared is None else self._shared.built.data

    async def collect_again(self) -> Body:
        """Return the body of an ended answer, without a charge. Raises the error that it ended with."""
        await self._attach()
        try:
            return await self.collect()
        finally:
            self._leave(self._detach_seconds)

    async def respond(self, http: web.Request) -> web.StreamResponse:
        if self._shared is not None:
            return self._shared.response(self._headers)
        if self.shows_state:
            return web.Response(body=await self.current_body(self.collect), content_type="application/json")
        return await super().respond(http)

    async def stream(self, http: web.Request) -> web.StreamResponse:
        if self._has_everything:
            return web.Response(status=204)  # which tells an EventSource to stay away
        return await super().stream(http)

    async def current_body(self, collect: Callable[[], Awaitable[Body]]) -> Body:
        """Return the body in its present state; `collect` builds that of an answer that has ended."""
        if not self._kept.has_result:
            return self._format().unfinished(self._kept.state)
        try:
            return await collect()
        except (Unavailable, RateLimited):
            raise
        except GatewayError as error:
            return self._format().unfinished("failed", error)

    def release(self, *, is_withdrawn: bool = False) -> None:
        self._leave(None if is_withdrawn else self._detach_seconds)
        if not self._completion.background:
            self._context.account.spend(self._num_used_tokens())  # only what was read


async def stream_again(http: web.Request, kept: KeptAnswer, *, num_known: int | None = None) -> web.StreamResponse:
    """Stream a kept answer, whatever its body requested. The stream has usage, as a collected answer does.

    `num_known` is the number of events that the client has already, if it sends no Last-Event-ID.
    """
    completion, context = kept.completion, context_of(http)
    include_usage = completion.include_usage or not completion.stream
    completion = structs.replace(completion, stream=True, include_usage=include_usage)
    if num_known is not None:
        context = replace(context, headers={LAST_EVENT_ID: first_events(num_known)})
    submission = KeptSubmission(context, kept, completion)
    await submission.submit()
    try:
        return await submission.stream(http)
    finally:
        submission.release()


async def show_again(context: RequestContext, kept: KeptAnswer) -> BuiltBody:
    """Return the body of a kept answer in its present state."""
    return as_built(kept, await KeptSubmission(context, kept).current_body(partial(read_again, context, kept)))


def as_built(kept: KeptAnswer, body: Body) -> BuiltBody:
    """Wrap a body that shows the complete kept answer."""
    num_tokens = 0 if kept.completion.background else kept.num_tokens
    return BuiltBody(body, kept.has_result, num_tokens, partial(kept.service.client.archive.keeps, kept.answer_id))


async def read_again(context: RequestContext, kept: KeptAnswer) -> Body:
    """Return the body of a kept answer, and charge it as the original. Background answers are charged once."""
    is_charged = not kept.completion.background
    if is_charged:
        context.account.check_debt()
    body = await collect_again(context, kept)
    if is_charged:
        context.account.spend(kept.num_tokens)
    return body


async def collect_again(context: RequestContext, kept: KeptAnswer) -> Body:
    """Return the body of an ended kept answer. Raises the error that it ended with."""
    return await KeptSubmission(context, kept).collect_again()


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists unknown fields."""
    listed = listed_names(names)
    return {"x-pagestream-ignored": ", ".join(listed)} if listed else {}
