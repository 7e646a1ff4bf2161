"""One answer on its way to its client: submitted to the engine, streamed or collected, released.

    await submission.submit()
    try:
        response = await submission.respond(http)  # stream(http), or the body of collect()
    finally:
        submission.release()                       # its tokens are charged; what nobody waits for is withdrawn

A new answer is an AnswerSubmission. A kept one is attached to in its place (KeptSubmission), and given from its
beginning or from the event at which a stream was cut.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from aiohttp import web

from gateway.answers.answer_extras import AnswerExtras
from gateway.answers.answer_kinds import AnswerKind
from gateway.answers.delivery import Reply, collect_reply, stream_reply
from gateway.answers.generation import Generation
from gateway.answers.kept_answers import KeptAnswer
from gateway.answers.retention import told_names
from gateway.errors import GatewayError, RateLimited, Unavailable
from gateway.http.event_numbers import END, EventNumbers, first_events
from gateway.http.event_numbers import HEADER as LAST_EVENT_ID
from gateway.http.event_stream import EventStream
from gateway.requests.openai_schema import CompletionRequest
from gateway.requests.responses_repeated import with_what_held
from gateway.state import RequestContext, context_of, route_name
from gateway.store.inference_client import Keep


class AnswerSubmission:
    """A new answer. It is charged when this gateway lets go of it, which may be long after its client has."""

    def __init__(self, context: RequestContext, reply: Reply, keeps: Sequence[Keep] = ()) -> None:
        """`keeps`: of an answer that is kept, one a prompt."""
        self._context = context
        self._reply = reply
        self._keeps = keeps
        self._release_place: Callable[[], None] | None = None  # among those of its key; once it is held

    @property
    def generation(self) -> Generation:
        return self._reply.generation

    @property
    def tells_state(self) -> bool:
        """Whether the state of an answer in the background is told, and the answer not waited for."""
        completion = self._reply.completion
        return completion.background and not completion.stream and not self._context.is_batch

    async def submit(self) -> None:
        """To be released afterwards; it is already, if this raises: Unavailable, RateLimited, or NameTaken."""
        try:
            await self._submit()
        except BaseException:
            self.release()
            raise

    async def _submit(self) -> None:
        self._hold_place()
        await self.generation.submit(self._keeps, self.generation.service.share_of(self._context.account))

    async def respond(self, http: web.Request) -> web.StreamResponse:
        """As the body asked: streamed, or collected, or as it stands."""
        if self._reply.completion.stream:
            return await self.stream(http)
        body = self._reply.response_format.unfinished("queued") if self.tells_state else await self.collect()
        return web.Response(body=body, content_type="application/json", headers=self._reply.headers)

    async def stream(self, http: web.Request) -> web.StreamResponse:
        return await stream_reply(EventStream(http, self._reply.headers, self._context.state.watch), self._reply)

    async def collect(self) -> bytes:
        """The whole body. Raises the error that the answer ended with."""
        return await collect_reply(self._reply)

    def release(self, *, is_withdrawn: bool = False) -> None:
        """An answer that is kept goes on for its time, unless it `is_withdrawn`; any other is withdrawn now."""
        self.generation.leave(None if is_withdrawn else self._reply.detach_seconds, self._settle)

    def _settle(self) -> None:
        self._spend()
        self._free_place()

    def _hold_place(self) -> None:
        self._release_place = self._context.charge.hold(self.generation.request_ids[0])

    def _free_place(self) -> None:
        if self._release_place is not None:
            self._release_place()

    def _spend(self) -> None:
        if self.generation.was_accepted:
            self._context.account.spend(self.generation.usage.all_tokens)


class KeptSubmission(AnswerSubmission):
    """A kept answer that is given again: a request and its tokens, but for one in the background, which is read in no
    other way."""

    def __init__(self, context: RequestContext, kept: KeptAnswer, completion: CompletionRequest | None = None) -> None:
        """`completion`: in place of what its body asked."""
        generation, record = kept.generation(), kept.record
        completion = kept.completion if completion is None else completion
        self._is_told = completion.stream and context.headers.get(LAST_EVENT_ID) == END  # its client has all of it
        if self._is_told:
            context = replace(context, headers={})
        reply = reply_of(
            context, kept.kind, completion, generation, [request.prompt_token_ids for request in kept.requests],
            record.created, record.detach_seconds,
        )  # fmt: skip
        super().__init__(context, reply)
        self._kept = kept

    async def _submit(self) -> None:
        """Raises also AnswerChanged, where a client's name for it stands for something else by now."""
        if self._is_told or (self.tells_state and not self._kept.has_result):
            return
        if not self._reply.completion.background:
            self._context.charge.check_debt()
        self._hold_place()
        await self._kept.attach(self.generation)

    async def respond(self, http: web.Request) -> web.StreamResponse:
        if self.tells_state:
            return web.Response(body=await self.state_told(self.collect), content_type="application/json")
        return await super().respond(http)

    async def stream(self, http: web.Request) -> web.StreamResponse:
        if self._is_told:
            return web.Response(status=204)  # which tells an EventSource to stay away
        return await super().stream(http)

    async def state_told(self, collect: Callable[[], Awaitable[bytes]]) -> bytes:
        """The body as it stands, whether or not it has ended well. `collect`: gives that of one which has."""
        if not self._kept.has_result:
            return self._reply.response_format.unfinished(self._kept.state)
        try:
            return await collect()
        except (Unavailable, RateLimited):
            raise
        except GatewayError as error:
            return self._reply.response_format.unfinished("failed", error)

    def release(self, *, is_withdrawn: bool = False) -> None:
        self.generation.leave(None if is_withdrawn else self._reply.detach_seconds, self._free_place)
        if not self._reply.completion.background:
            self._spend()  # what was read; not what comes while nobody does


async def stream_again(http: web.Request, kept: KeptAnswer, *, num_known: int | None = None) -> web.StreamResponse:
    """As events, whatever its body asked; a collected answer has its usage, so its stream has it too. `num_known`:
    how many events the client has of the one choice, where it does not say so with Last-Event-ID."""
    completion, context = kept.completion, context_of(http)
    include_usage = completion.include_usage or not completion.stream
    completion = replace(completion, stream=True, include_usage=include_usage)
    if num_known is not None:
        context = replace(context, headers={LAST_EVENT_ID: first_events(num_known)})
    with context.state.open_requests.counted(route_name(http)):
        submission = KeptSubmission(context, kept, completion)
        await submission.submit()
        try:
            return await submission.stream(http)
        finally:
            submission.release()


async def show_again(context: RequestContext, kept: KeptAnswer) -> bytes:
    """The body of a kept answer as it stands."""
    return await KeptSubmission(context, kept).state_told(partial(read_again, context, kept))


async def read_again(context: RequestContext, kept: KeptAnswer) -> bytes:
    """collect_again(), charged as its making was, but for one in the background, which is read in no other way."""
    is_charged = not kept.completion.background
    if is_charged:
        context.charge.check_debt()
    body = await collect_again(context, kept)
    if is_charged:
        context.account.spend(kept.num_tokens)
    return body


async def collect_again(context: RequestContext, kept: KeptAnswer) -> bytes:
    """The body of a kept answer that has ended. Raises the error that it ended with."""
    submission = KeptSubmission(context, kept)
    await kept.attach(submission.generation)
    try:
        return await submission.collect()
    finally:
        submission.generation.leave(kept.record.detach_seconds)


def reply_of(
    context: RequestContext,
    kind: AnswerKind,
    completion: CompletionRequest,
    generation: Generation,
    token_ids: Sequence[list[int]],
    created: int,
    detach_seconds: float | None,
) -> Reply:
    service, answer_id = generation.service, generation.request_ids[0]
    include_usage = completion.stream and (completion.include_usage or context.state.settings.force_include_usage)
    headers, numbers = ignored_header(completion.ignored), None
    if detach_seconds is not None:
        headers |= {"Content-Location": f"/v1/requests/{answer_id}"}
        numbers = EventNumbers(len(completion.prompts) * completion.n, context.headers.get(LAST_EVENT_ID, ""))
    model = service.require_model()
    response_format = kind.make_format(
        answer_id,
        service.name,
        usage_in_chunks=include_usage,
        created=created,
        prompt_tokens=sum(map(len, token_ids)),
        repeated=with_what_held(completion.repeated, completion.fields, generation.sampling),
        system_fingerprint=model.fingerprint,
    )
    return Reply(
        work=context.work,
        completion=completion,
        generation=generation,
        response_format=response_format,
        extras=AnswerExtras(completion, model.encoder, token_ids, prompt_in_choice=response_format.prompt_in_choice),
        include_usage=include_usage,
        headers=headers,
        numbers=numbers,
        detach_seconds=detach_seconds,
    )


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Of unknown fields."""
    told = told_names(names)
    return {"x-pagestream-ignored": ", ".join(told)} if told else {}
