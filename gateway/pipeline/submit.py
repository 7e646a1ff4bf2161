"""The request path, the same for every API: decode, validate, plan, submit, then stream or collect, and settle.

body -> JsonBody -> CompletionRequest -> GenerationRequests -> AnswerSubmission -> response
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from msgspec import structs

from gateway.fleet import unavailable
from gateway.http.body import received_body
from gateway.http.headers import NAME_HEADER
from gateway.http.json_body import JsonBody
from gateway.http.openapi import EVENTS, INFERENCE_ERRORS, KEEPING_PARAMETERS, Operation
from gateway.model_service import ModelService, ReadModel, find_model
from gateway.pipeline.answer_kind import AnswerKind
from gateway.pipeline.context import RequestContext, context_of
from gateway.pipeline.fields import PRIORITY_HEADER, asked_class, timeouts_of
from gateway.pipeline.kept import AnswerChanged, find_named
from gateway.pipeline.plan import encode_prompts, has_more_work, prepared
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.retention import Retention, new_terms, retention_of
from gateway.pipeline.submission import AnswerSubmission, KeptSubmission
from gateway.store.store_calls import StoreUnavailable
from shared.messages import GenerationRequest
from shared.redis_scripts import NameTaken

MAX_ATTEMPTS = 8  # at what a name stands for: each but the first because another request changed it meanwhile


def generating(
    path: str, kind: AnswerKind, summary: str, *, body: Any, shape: Any, media: tuple[str, ...] = (EVENTS,)
) -> Operation:
    """Return the POST operation that answers with `kind`, as a body of a `shape` or as a stream."""
    return Operation(
        "POST", path, partial(answer, kind=kind), summary,
        body=body, answer=shape, media=media, errors=INFERENCE_ERRORS, parameters=KEEPING_PARAMETERS,
        generates=True, is_admitted=True,
    )  # fmt: skip


async def answer(http: web.Request, kind: AnswerKind) -> web.StreamResponse:
    context = context_of(http)
    async with received_body(http) as data:
        body = await context.read(len(data), partial(kind.decode, data))
        del data
        submission = await submitted(context, kind, body)
    try:
        return await submission.respond(http)
    finally:
        submission.release()


async def submitted(context: RequestContext, kind: AnswerKind, body: JsonBody) -> AnswerSubmission:
    """Return a new answer, or the kept answer of the client's idempotency key. The caller releases it.

    Raises:
        GatewayError: If the request is refused.
    """
    state, account = context.state, context.account
    if kind.complete is not None:
        body = await kind.complete(context, body)
    completion = await context.read(body.num_bytes, partial(kind.parse, body))
    service = state.models.find(completion.model, account)
    name = context.headers.get(NAME_HEADER)
    retention = None  # an answer for this connection alone
    if name is not None or completion.background or completion.fields.detach_seconds is not None:
        retention = await context.read(0 if name is None else body.num_bytes, partial(
            retention_of, name, completion, kind.name, body, account.owner_key_hash,
            default_detach_seconds=context.default_detach_seconds,
            max_detach_seconds=state.settings.max_detach_seconds,
        ))  # fmt: skip
    for _ in range(MAX_ATTEMPTS):
        kept = None
        if retention is not None and retention.name:
            async with state.kept_bodies.turn(account.owner_key_hash):
                kept, stale_id = await find_named(service, context.kinds, retention, account.owner_key_hash)
            retention = replace(retention, stale_id=stale_id)
        submission: AnswerSubmission
        try:
            if kept is not None:
                submission = KeptSubmission(context, kept)
            else:
                account.check_debt()
                submission = await _planned(context, service, kind, body, completion, retention)
            await submission.submit()
            return submission
        except (NameTaken, AnswerChanged):
            pass  # by a request of the same name, at the same time: it may be another's body, or have ended already
    raise unavailable("name_contended")


async def _planned(
    context: RequestContext,
    service: ModelService,
    kind: AnswerKind,
    body: JsonBody,
    completion: CompletionRequest,
    retention: Retention | None,
) -> AnswerSubmission:
    completion, planned = await _engine_requests(context, service, body, completion)
    created, terms_of_each = int(time.time()), []
    if retention is not None:
        terms = partial(new_terms, retention, planned, kind, body, completion.ignored, created)
        terms_of_each = await context.read(body.num_bytes, terms)
    return AnswerSubmission(
        context, service, kind, completion, planned, created, terms_of_each=terms_of_each,
        detach_seconds=retention.detach_seconds if retention else None,
    )  # fmt: skip


async def _engine_requests(
    context: RequestContext, service: ModelService, body: JsonBody, completion: CompletionRequest
) -> tuple[CompletionRequest, list[GenerationRequest]]:
    """Plan the requests. Refuse a body that cannot be served before its prompts are encoded."""
    account = context.account
    timeouts = timeouts_of(completion.fields, context.default_timeouts, context.state.settings.max_timeout_seconds)
    model = service.admit()
    service.check_task(completion.task, context.state.models.of(account))
    timeouts = service.within_wait(timeouts)
    asked = asked_class(completion.fields.priority, context.headers.get(PRIORITY_HEADER), completion.default_class)
    completion, planned = await context.read(
        None if has_more_work(completion) else body.num_bytes,
        partial(prepared, model, service.limits(model), completion),
    )
    sender: dict[str, Any] = {
        "priority_class": account.priority_class(asked),
        "tenant": account.tenant,
        "tenant_weight": account.weight,
        "tenant_max_running": account.max_running,
        "traceparent": context.traceparent,
    }
    if timeouts:
        now = await _fleet_seconds(service)
        sender["deadline"] = now + timeouts.total_seconds if timeouts.total_seconds else None
        sender["queue_deadline"] = now + timeouts.queue_seconds if timeouts.queue_seconds else None
    return completion, [structs.replace(request, **sender) for request in planned]


async def _fleet_seconds(service: ModelService) -> float:
    try:
        return await service.client.probe.fleet_seconds()
    except StoreUnavailable as error:
        raise unavailable("store_unavailable") from error


_Body = TypeVar("_Body")


def num_prompt_tokens(body: _Body, parse: Callable[[_Body], CompletionRequest], models: Sequence[ReadModel]) -> int:
    """Return the length in tokens of the only prompt of a body, as its usage would report it. Raises GatewayError."""
    request = parse(body)
    (token_ids,) = encode_prompts(*find_model(models, request.model).require(), request)
    return len(token_ids)
