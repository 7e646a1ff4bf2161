"""The body of a text completion. Pure."""

from typing import Annotated

from msgspec import Meta, structs

from gateway.errors import InvalidRequest
from gateway.http.json_body import JsonBody
from gateway.pipeline.fields import GenerationFields, NumLogprobs, TokenId
from gateway.pipeline.request import CompletionRequest, check_other_fields, common_request, prompt_list

MAX_PROMPTS = 32


class CompletionBody(GenerationFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 0 scores the prompt only (with echo)


def parse_completion(body: JsonBody) -> CompletionRequest:
    fields = body.typed(CompletionBody)
    ignored = check_other_fields(CompletionBody, body.given)
    request = common_request(
        fields,
        prompt_list(fields.prompt, "prompt", MAX_PROMPTS),
        ignored,
        prompt_param="prompt",
        max_tokens_param="max_tokens",
        default_max_tokens=16,  # OpenAI's default
        add_special_tokens=fields.add_special_tokens is not False,
        echo=bool(fields.echo),
    )
    if fields.max_tokens == 0 and not fields.echo:
        raise InvalidRequest("max_tokens: 0 is only allowed with echo; expected at least 1.", param="max_tokens")
    return structs.replace(request, num_logprobs=fields.logprobs)
