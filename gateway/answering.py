"""The life of an inference request, shared by chat and completions: admit, encode, submit, then stream or collect."""

import asyncio
import time
from collections.abc import Callable, Sequence

from aiohttp import web

from gateway import sse
from gateway.access import ACCOUNT, begin
from gateway.chat_template import ChatTemplateError
from gateway.errors import GatewayError, InvalidRequest
from gateway.event_stream import EventStream
from gateway.generation import ChoiceUpdate, Generation
from gateway.http_body import read_body
from gateway.keys import STATE
from gateway.logprobs import LogprobEntry
from gateway.middlewares import route_name
from gateway.openai_response import ChoiceResult, ResponseFormat
from gateway.openai_schema import ChatPrompt, CompletionRequest, Prompt
from gateway.planning import ModelLimits, context_exceeded, plan_requests
from gateway.served_model import ServedModel
from gateway.tokenization import PromptEncoder
from shared.messages import FinishReason

# Encoding is about 0.4 us a character; more than 5 ms of it leave the event loop.
_INLINE_CHARS = 10_000


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
    await state.grammar_checks.check(request.grammar)
    model = state.admit()
    limits = state.limits(model)
    token_ids = [
        await encode_prompt(model, limits, prompt, request.prompt_param, request.add_special_tokens)
        for prompt in request.prompts
    ]
    planned = plan_requests(request, token_ids, limits, account.tenant, account.priority_class())
    prefixes = _echoes(model.encoder, request, token_ids)
    include_usage = request.stream and (request.include_usage or state.settings.force_include_usage)
    response_format = make_format(planned[0].request.request_id, state.model_name, usage_in_chunks=include_usage)
    headers = _ignored_header(request.ignored)
    generation = Generation(state, model, request, planned, arrived_at)
    begin(account)
    with state.counted(route_name(http)):
        try:
            await generation.submit()
            if request.stream:
                stream = EventStream(http, headers, state.watch)
                return await _stream(stream, _Chunks(generation, response_format, request, include_usage), prefixes)
            with_logprobs = request.num_logprobs is not None
            return await _collect(generation, response_format, prefixes, headers, with_logprobs)
        finally:
            generation.abandon()
            account.end(generation.usage.prompt_tokens + generation.usage.completion_tokens)


async def encode_prompt(
    model: ServedModel, limits: ModelLimits, prompt: Prompt, param: str, add_special_tokens: bool
) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    encoder = model.encoder
    if isinstance(prompt, str):
        return await _encode(encoder, limits, prompt, param, lambda: encoder.encode_text(
            prompt, add_special_tokens=add_special_tokens
        ))  # fmt: skip
    return await _encode_chat(encoder, limits, prompt, param, add_special_tokens)


async def _encode_chat(
    encoder: PromptEncoder, limits: ModelLimits, prompt: ChatPrompt, param: str, add_special_tokens: bool
) -> list[int]:
    try:
        chat = encoder.render_chat(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
        )
    except ChatTemplateError as error:
        raise InvalidRequest(f"{param}: {error}.", param=param) from error
    return await _encode(
        encoder, limits, chat.text, param, lambda: encoder.encode_chat(chat, add_special_tokens=add_special_tokens)
    )


async def _encode(
    encoder: PromptEncoder, limits: ModelLimits, text: str, param: str, encode: Callable[[], list[int]]
) -> list[int]:
    least = encoder.least_tokens(text)
    if least >= limits.max_model_len:
        raise context_exceeded(f"at least {least}", param, limits)
    return encode() if len(text) <= _INLINE_CHARS else await asyncio.to_thread(encode)


class _Chunks:
    """Updates of choices -> the bytes of one write."""

    def __init__(
        self, generation: Generation, response_format: ResponseFormat, request: CompletionRequest, include_usage: bool
    ) -> None:
        self.generation = generation
        self._format = response_format
        self._continuous_usage = request.continuous_usage
        self._include_usage = include_usage
        self._begun: set[int] = set()

    def of(self, updates: Sequence[ChoiceUpdate], prefixes: Sequence[str]) -> bytes:
        chunks = []
        for update in updates:
            text = update.text
            if update.index not in self._begun:
                self._begun.add(update.index)
                chunks.append(self._format.first(update.index))
                text = prefixes[update.index] + text
            if text or update.logprobs or update.reason is None:
                usage = self.generation.usage if self._continuous_usage else None
                chunks.append(self._format.text(update.index, text, usage, update.logprobs))
            if update.reason is not None:
                chunks.append(self._format.finish(update.index, update.reason))
        return b"".join(chunks)

    def last(self) -> bytes:
        usage = self._format.usage(self.generation.usage) if self._include_usage else b""
        return usage + sse.DONE


async def _stream(stream: EventStream, chunks: _Chunks, prefixes: Sequence[str]) -> web.StreamResponse:
    """200 leaves here, as the store has the request. An error from now on is an event of the stream."""
    await stream.open()
    try:
        ending = b""
        try:
            async for updates in chunks.generation.updates():
                data = chunks.of(updates, prefixes)
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
    generation: Generation,
    response_format: ResponseFormat,
    prefixes: Sequence[str],
    headers: dict[str, str],
    with_logprobs: bool,
) -> web.StreamResponse:
    texts = [[prefix] for prefix in prefixes]
    logprobs: list[list[LogprobEntry]] = [[] for _ in prefixes]
    reasons = [FinishReason.STOP] * len(prefixes)
    async for updates in generation.updates():
        for update in updates:
            texts[update.index].append(update.text)
            logprobs[update.index] += update.logprobs
            if update.reason is not None:
                reasons[update.index] = update.reason
    results = [
        ChoiceResult(index, "".join(pieces), reason, logprobs[index] if with_logprobs else None)
        for index, (pieces, reason) in enumerate(zip(texts, reasons, strict=True))
    ]
    body = response_format.body(results, generation.usage)
    return web.Response(body=body, content_type="application/json", headers=headers)


def _echoes(encoder: PromptEncoder, request: CompletionRequest, token_ids: Sequence[list[int]]) -> list[str]:
    """What stands before each choice's own text: its prompt, if `echo`."""
    if not request.echo:
        return [""] * (len(request.prompts) * request.n)
    texts = [
        prompt if isinstance(prompt, str) else encoder.decode(ids, skip_special_tokens=False)
        for prompt, ids in zip(request.prompts, token_ids, strict=True)
    ]
    return [text for text in texts for _ in range(request.n)]


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Names come from the client: only plain ones may enter a header, and not without end."""
    plain = [name for name in names if name.isascii() and name.isidentifier() and len(name) <= 64]
    return {"x-pagestream-ignored": ", ".join(plain[:16])} if plain else {}
