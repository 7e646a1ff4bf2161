"""The life of an inference request, shared by all kinds: admit, encode, submit, then stream or collect.

A kept answer can be given again, from its beginning or from the event at which a stream was cut.
"""

import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from aiohttp import web

from gateway.admission import unavailable
from gateway.answers.answer_extras import AnswerExtras
from gateway.answers.answer_kinds import AnswerKind
from gateway.answers.asker import Asker
from gateway.answers.delivery import Reply, collect_reply, stream_reply
from gateway.answers.generation import Generation
from gateway.answers.keeping import Wish, new_keeps, wish_of
from gateway.answers.kept_answers import AnswerChanged, KeptAnswer, find_named
from gateway.answers.kept_body import told_names
from gateway.answers.message_parsing import with_calls
from gateway.auth.charges import CHARGE
from gateway.errors import GatewayError, RateLimited, Unavailable
from gateway.http.event_numbers import END, EventNumbers, first_events
from gateway.http.event_numbers import HEADER as LAST_EVENT_ID
from gateway.http.event_stream import EventStream
from gateway.http.http_body import read_body
from gateway.http.route_name import route_name
from gateway.keys import STATE
from gateway.models.model_service import ModelService
from gateway.requests.deadlines import timeouts_of, with_deadlines
from gateway.requests.extra_fields import PRIORITY_HEADER, asked_class
from gateway.requests.openai_schema import CompletionRequest
from gateway.requests.preparation import has_more_work, prepared
from gateway.requests.request_body import JsonBody
from gateway.store.inference_client import NameTaken, StoreUnavailable
from gateway.tracing import traceparent_of

MAX_LOOKS = 8  # at what a name stands for: each but the first because another request changed it meanwhile

_Given = TypeVar("_Given")
Begin: TypeAlias = Callable[[], Coroutine[Any, Any, None]]  # submits the reply's generation, or attaches to it
Give: TypeAlias = Callable[[Reply, Begin], Awaitable[_Given]]
Whole: TypeAlias = Callable[[Asker, JsonBody], Awaitable[JsonBody]]
GiveAgain: TypeAlias = Callable[[KeptAnswer], Awaitable[_Given]]


async def answer(http: web.Request, kind: AnswerKind, whole: Whole | None = None) -> web.StreamResponse:
    """`whole` makes the fields that are read and stored of those that were sent."""
    arrived_at, state, asker = time.monotonic(), http.app[STATE], asker_of(http)
    data = await read_body(http, state.settings.body_timeout_seconds)
    with state.open_requests.counted(route_name(http)):
        body = await asker.work(len(data), partial(kind.decode, data))
        if whole is not None:
            body = await whole(asker, body)
        return await answered(
            asker, kind, body, arrived_at, give=partial(give, http), give_again=partial(_answer_again, http)
        )


async def answered(
    asker: Asker,
    kind: AnswerKind,
    body: JsonBody,
    arrived_at: float,
    *,
    give: Give[_Given],
    give_again: GiveAgain[_Given],
) -> _Given:
    """What `give` makes of a new answer, or `give_again` of the kept one that the asker's name stands for."""
    state, account = asker.state, asker.account
    completion = await asker.work(body.num_bytes, partial(kind.parse, body))
    service = state.service(completion.model, account)
    wish = await asker.work(body.num_bytes, partial(
        wish_of, asker.headers, completion, kind.name, body, account.owner_key_hash,
        default_detach_seconds=asker.default_detach_seconds,
        max_detach_seconds=state.settings.max_detach_seconds,
    ))  # fmt: skip
    for _ in range(MAX_LOOKS):
        found, stale_id = None, ""
        if wish is not None and wish.name:
            found, stale_id = await find_named(service, wish, account.owner_key_hash)
            wish = replace(wish, stale_id=stale_id)
        try:
            if found is not None:
                return await give_again(found)
            asker.charge.begin_generating()
            return await give(*await _new_reply(asker, service, kind, body, completion, wish, arrived_at))
        except (NameTaken, AnswerChanged):
            pass  # by a request of the same name, at the same time: it may be another's body, or have ended already
    raise unavailable("name_contended", "Too many requests with this Idempotency-Key came and went at the same time.")


def asker_of(http: web.Request) -> Asker:
    state = http.app[STATE]
    return Asker(
        state,
        http[CHARGE],
        http.headers,
        state.default_timeouts,
        state.settings.default_detach_seconds,
        traceparent_of(http),
    )


async def _new_reply(
    asker: Asker,
    service: ModelService,
    kind: AnswerKind,
    body: JsonBody,
    completion: CompletionRequest,
    wish: Wish | None,
    arrived_at: float,
) -> tuple[Reply, Begin]:
    state, account = asker.state, asker.account
    timeouts = timeouts_of(completion.fields, asker.default_timeouts, state.settings.max_timeout_seconds)
    model = service.admit()
    timeouts = service.within_wait(timeouts)
    asked = asked_class(completion.fields.priority, asker.headers.get(PRIORITY_HEADER))
    completion, planned = await asker.work(
        None if has_more_work(completion) else body.num_bytes,
        partial(
            prepared, model, service.limits(model), completion,
            account.tenant, account.priority_class(asked), asker.traceparent,
            partial(with_calls, service.options, model.encoder),
        ),
    )  # fmt: skip
    if timeouts:
        planned = with_deadlines(planned, timeouts, await _fleet_seconds(service))
    created, answer_id = int(time.time()), planned[0].request.request_id
    keeps = (
        await asker.work(body.num_bytes, partial(new_keeps, wish, planned, kind, body, completion.ignored, created))
        if wish
        else []
    )
    detach_seconds = wish.detach_seconds if wish else None
    metrics = service.metrics if asker.is_recorded else service.unrecorded
    generation = Generation(service, model, completion, planned, arrived_at, metrics)
    token_ids = [plan.request.prompt_token_ids for plan in planned]
    reply = _reply(asker, kind, completion, generation, token_ids, answer_id, created, detach_seconds)
    return reply, partial(generation.submit, keeps, service.share_of(account))


async def _fleet_seconds(service: ModelService) -> float:
    try:
        return await service.client.probe.fleet_seconds()
    except StoreUnavailable as error:
        raise unavailable("store_unavailable", "The request store does not take requests now.") from error


async def _answer_again(http: web.Request, kept: KeptAnswer) -> web.StreamResponse:
    """As its body asked: streamed, or collected, or as it stands."""
    if kept.completion.background and not kept.completion.stream:
        return web.Response(body=await show_again(http, kept), content_type="application/json")
    return await _give_again(http, kept, kept.completion)


async def stream_again(http: web.Request, kept: KeptAnswer, *, num_known: int | None = None) -> web.StreamResponse:
    """As events, whatever its body asked; a collected answer has its usage, so its stream has it too. `num_known`:
    how many events the client has of the one choice, where it does not say so with Last-Event-ID."""
    completion = kept.completion
    include_usage = completion.include_usage or not completion.stream
    completion = replace(completion, stream=True, include_usage=include_usage)
    with http.app[STATE].open_requests.counted(route_name(http)):
        return await _give_again(http, kept, completion, None if num_known is None else first_events(num_known))


async def read_again(asker: Asker, kept: KeptAnswer) -> bytes:
    """collect_again(), charged as its making was, but for one in the background, which is read in no other way."""
    is_charged = not kept.completion.background
    if is_charged:
        asker.charge.check_debt()
    body = await collect_again(asker, kept)
    if is_charged:
        asker.account.spend(kept.num_tokens)
    return body


async def collect_again(asker: Asker, kept: KeptAnswer) -> bytes:
    """The body of a kept answer that has ended. Raises the error that it ended with."""
    reply, begin_generation = reply_again(asker, kept, kept.completion)
    try:
        await begin_generation()
        return await collect_reply(reply)
    finally:
        reply.generation.leave(kept.record.detach_seconds)


async def show_again(http: web.Request, kept: KeptAnswer) -> bytes:
    """The body of a kept answer as it stands, whether or not it has ended well."""
    asker = asker_of(http)
    if kept.state in ("finished", "failed"):
        try:
            return await read_again(asker, kept)
        except (Unavailable, RateLimited):
            raise
        except GatewayError as error:
            return reply_again(asker, kept, kept.completion)[0].response_format.unfinished("failed", error)
    return reply_again(asker, kept, kept.completion)[0].response_format.unfinished(kept.state)


def reply_again(asker: Asker, kept: KeptAnswer, completion: CompletionRequest) -> tuple[Reply, Begin]:
    token_ids = [request.prompt_token_ids for request in kept.requests]
    generation = kept.generation()
    created, detach_seconds = kept.record.created, kept.record.detach_seconds
    reply = _reply(asker, kept.kind, completion, generation, token_ids, kept.answer_id, created, detach_seconds)
    return reply, partial(kept.attach, generation)


async def _give_again(
    http: web.Request, kept: KeptAnswer, completion: CompletionRequest, last_event_id: str | None = None
) -> web.StreamResponse:
    """`last_event_id`: in place of what the headers say."""
    asker = asker_of(http)
    if last_event_id is not None:
        asker = replace(asker, headers={LAST_EVENT_ID: last_event_id})
    if completion.stream and asker.headers.get(LAST_EVENT_ID) == END:
        return web.Response(status=204)  # which tells an EventSource to stay away
    is_charged = not completion.background  # as in read_again()
    if is_charged:
        asker.charge.check_debt()
    reply, attach = reply_again(asker, kept, completion)
    try:
        return await _given(http, reply, attach, asker.charge.hold(kept.answer_id))
    finally:
        if is_charged:
            asker.account.spend(reply.generation.usage.all_tokens)


def _reply(
    asker: Asker,
    kind: AnswerKind,
    completion: CompletionRequest,
    generation: Generation,
    token_ids: Sequence[list[int]],
    answer_id: str,
    created: int,
    detach_seconds: float | None,
) -> Reply:
    service, settings = generation.service, asker.state.settings
    include_usage = completion.stream and (completion.include_usage or settings.force_include_usage)
    headers, numbers = ignored_header(completion.ignored), None
    if detach_seconds is not None:
        headers |= {"Content-Location": f"/v1/requests/{answer_id}"}
        numbers = EventNumbers(len(completion.prompts) * completion.n, asker.headers.get(LAST_EVENT_ID, ""))
    model = service.require_model()
    response_format = kind.make_format(
        answer_id,
        service.name,
        usage_in_chunks=include_usage,
        created=created,
        prompt_tokens=sum(map(len, token_ids)),
        repeated=completion.repeated,
        system_fingerprint=model.fingerprint,
    )
    return Reply(
        work=asker.work,
        completion=completion,
        generation=generation,
        response_format=response_format,
        extras=AnswerExtras(completion, model.encoder, token_ids, prompt_in_choice=response_format.prompt_in_choice),
        include_usage=include_usage,
        headers=headers,
        numbers=numbers,
        detach_seconds=detach_seconds,
    )


async def give(http: web.Request, reply: Reply, submit: Begin) -> web.StreamResponse:
    """A new answer. It is charged when this gateway lets go of it, which may be long after its client has."""
    charge, generation = http[CHARGE], reply.generation
    release = charge.hold(generation.request_ids[0])

    def settle() -> None:
        if generation.was_accepted:
            charge.account.spend(generation.usage.all_tokens)
        release()

    return await _given(http, reply, submit, settle)


async def _given(
    http: web.Request, reply: Reply, begin_generation: Begin, let_go: Callable[[], None]
) -> web.StreamResponse:
    try:
        await begin_generation()
        if reply.completion.stream:
            return await stream_reply(EventStream(http, reply.headers, http.app[STATE].watch), reply)
        if reply.completion.background:
            body = reply.response_format.unfinished("queued")
        else:
            body = await collect_reply(reply)
        return web.Response(body=body, content_type="application/json", headers=reply.headers)
    finally:
        reply.generation.leave(reply.detach_seconds, let_go)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Of unknown fields."""
    told = told_names(names)
    return {"x-pagestream-ignored": ", ".join(told)} if told else {}
