"""The life of an inference request, shared by chat and completions: admit, encode, submit, then stream or collect."""

import time
from collections.abc import Callable, Sequence

from aiohttp import web

from gateway import sse
from gateway.access import ACCOUNT, begin
from gateway.answer_extras import AnswerExtras
from gateway.errors import GatewayError
from gateway.event_stream import EventStream
from gateway.extra_fields import PRIORITY_HEADER, asked_class
from gateway.generation import ChoiceUpdate, Generation
from gateway.http_body import read_body
from gateway.keys import STATE
from gateway.middlewares import route_name
from gateway.openai_response import ChoiceResult, ResponseFormat
from gateway.openai_schema import CompletionRequest
from gateway.planning import plan_requests
from gateway.prompt_echo import EncodedPrompt, PromptEcho
from gateway.prompt_encoding import encode_prompts
from gateway.tokenization import PromptEncoder
from shared.messages import FinishReason


async def answer(
    http: web.Request,
    parse: Callable[[bytes], CompletionRequest],
    make_format: Callable[..., ResponseFormat],
) -> web.StreamResponse:
    arrived_at = time.monotonic()
    state = http.app[STATE]
    request = parse(await read_body(http, state.settings.body_timeout_seconds))
    state.check_model_name(request.model)
    account = http[ACCOUNT]
    model = state.admit()
    limits = state.limits(model)
    prompts = await encode_prompts(model, limits, request)
    priority_class = account.priority_class(asked_class(request.fields.priority, http.headers.get(PRIORITY_HEADER)))
    token_ids = [prompt.token_ids for prompt in prompts]
    planned = plan_requests(request, token_ids, limits, account.tenant, priority_class)
    include_usage = request.stream and (request.include_usage or state.settings.force_include_usage)
    response_format = make_format(planned[0].request.request_id, state.model_name, usage_in_chunks=include_usage)
    headers = _ignored_header(request.ignored)
    extras = AnswerExtras(request, model.encoder, prompts, prompt_in_choice=response_format.prompt_in_choice)
    generation = Generation(state, model, request, planned, arrived_at, _echo(model.encoder, request, prompts))
    begin(account)
    with state.counted(route_name(http)):
        try:
            await generation.submit()
            if request.stream:
                stream = EventStream(http, headers, state.watch)
                return await _stream(stream, _Chunks(generation, response_format, request, extras, include_usage))
            body = await _collect(generation, response_format, request, extras)
            return web.Response(body=body, content_type="application/json", headers=headers)
        finally:
            generation.abandon()
            account.end(generation.usage.prompt_tokens + generation.usage.completion_tokens)


class _Chunks:
    """Updates of choices -> the bytes of one write."""

    def __init__(
        self,
        generation: Generation,
        response_format: ResponseFormat,
        request: CompletionRequest,
        extras: AnswerExtras,
        include_usage: bool,
    ) -> None:
        self.generation = generation
        self._extras = extras
        self._format = response_format
        self._continuous_usage = request.continuous_usage
        self._include_usage = include_usage
        self._begun: set[int] = set()

    def of(self, updates: Sequence[ChoiceUpdate]) -> bytes:
        chunks = []
        for update in updates:
            is_first = update.index not in self._begun
            if is_first:
                self._begun.add(update.index)
                chunks.append(self._format.first(update.index, self._extras.of_first_chunk()))
            if update.text or update.logprobs or update.reason is None:
                usage = self.generation.usage if self._continuous_usage else None
                extra = self._extras.of_chunk(update.index, update.token_ids, is_first=is_first)
                chunks.append(self._format.text(update.index, update.text, usage, update.logprobs, extra))
            if update.reason is not None:
                chunks.append(self._format.finish(update.index, update.reason))
        return b"".join(chunks)

    def last(self) -> bytes:
        usage = self._format.usage(self.generation.usage) if self._include_usage else b""
        return usage + sse.DONE


async def _stream(stream: EventStream, chunks: _Chunks) -> web.StreamResponse:
    """200 leaves here, as the store has the request. An error from now on is an event of the stream."""
    await stream.open()
    try:
        ending = b""
        try:
            async for updates in chunks.generation.updates():
                data = chunks.of(updates)
                if data:
                    await stream.write(data)
            ending = chunks.last()
        except GatewayError as error:
            ending = sse.error_event(error.body()) + sse.DONE
        await stream.write(ending)
        await stream.response.write_eof()
    finally:
        stream.close()
    return stream.response


async def _collect(
    generation: Generation, response_format: ResponseFormat, request: CompletionRequest, extras: AnswerExtras
) -> bytes:
    """The whole answer."""
    collected: dict[int, list[ChoiceUpdate]] = {index: [] for index in range(len(request.prompts) * request.n)}
    async for updates in generation.updates():
        for update in updates:
            collected[update.index].append(update)
    scores = generation.prompt_scores
    results = []
    for index, parts in collected.items():
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        logprobs = [entry for part in parts for entry in part.logprobs]
        result = ChoiceResult(
            index,
            "".join(part.text for part in parts),
            next((part.reason for part in reversed(parts) if part.reason is not None), FinishReason.STOP),
            None if request.num_logprobs is None else logprobs,
            extras.of_choice(index, token_ids, scores),
        )
        results.append(result)
    return response_format.body(results, generation.usage, extras.of_answer(scores))


def _echo(
    encoder: PromptEncoder, request: CompletionRequest, prompts: Sequence[EncodedPrompt]
) -> PromptEcho | None:
    if not request.echo:
        return None
    return PromptEcho(encoder, prompts, request.n, drop_answers=request.max_tokens == 0)


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Names come from the client: only plain ones may enter a header, and not without end."""
    plain = [name for name in names if name.isascii() and name.isidentifier() and len(name) <= 64]
    return {"x-pagestream-ignored": ", ".join(plain[:16])} if plain else {}
