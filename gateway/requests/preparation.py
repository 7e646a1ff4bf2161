"""A CompletionRequest -> the GenerationRequests of the engine: its grammar checked, its texts encoded, its limits kept.

Blocking: what it costs grows with the body, but for what has_more_work() tells of. Pure but for random ids.
"""

from collections.abc import Callable
from dataclasses import replace

from gateway.requests.grammar_checks import check_asked
from gateway.requests.openai_schema import ChatPrompt, CompletionRequest
from gateway.requests.planning import ModelLimits, PlannedRequest, plan_requests
from gateway.requests.prompt_encoding import encode_prompts, encode_words
from gateway.text.served_model import ServedModel

_FEW_WORDS = 16  # each is two calls of the tokenizer, 20 us
_FEW_MESSAGES = 64  # a template takes about 8 us a message, and is no code of ours


def has_more_work(request: CompletionRequest) -> bool:
    """Than the size of its body tells."""
    chats = (prompt for prompt in request.prompts if isinstance(prompt, ChatPrompt))
    return (
        bool(request.grammars)
        or len(request.fields.bad_words or ()) > _FEW_WORDS
        or any(len(chat.messages) + len(chat.tools) > _FEW_MESSAGES for chat in chats)
    )


def prepared(
    model: ServedModel,
    limits: ModelLimits,
    request: CompletionRequest,
    tenant: str,
    priority_class: str,
    traceparent: str,
    with_calls: Callable[[CompletionRequest], CompletionRequest],
) -> tuple[CompletionRequest, list[PlannedRequest]]:
    """The request with its bad words as tokens, and what goes to the engine. Raises InvalidRequest.

    `with_calls`: adds to an answer's grammar the calls that may stand in its place."""
    request = _bound(request, with_calls)
    token_ids = encode_prompts(model, limits, request)
    request = replace(request, bad_words=encode_words(model, request.fields.bad_words or ()))
    return request, plan_requests(request, token_ids, limits, tenant, priority_class, traceparent)


def _bound(
    request: CompletionRequest, with_calls: Callable[[CompletionRequest], CompletionRequest]
) -> CompletionRequest:
    """What was asked for is checked before it is put together: errors name what a client wrote."""
    for asked in request.grammars:
        check_asked(asked)
    bound = with_calls(request)
    if bound is not request:
        check_asked(bound.grammar)
    return bound
