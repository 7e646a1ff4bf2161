"""The bodies of embeddings, rerank, and score. Pure.

Each input, or pair of texts, is a prompt of its own. A pair is rendered in the format of Qwen3-Reranker, which answers
no or yes.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest, MissingParameter
from gateway.http.json_body import JsonBody
from gateway.pipeline.fields import ChoiceCount, GenerationFields, TokenId
from gateway.pipeline.request import NO_EFFECT, CompletionRequest, FilledPrompt, Prompt, check_other_fields, prompt_list
from shared.messages import Pooling
from shared.model_files import Task

MAX_INPUTS = 1024  # the default of --max-num-queued-reqs: they are queued together
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# field -> values besides null that have no effect
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (),
    "truncate": (False,),
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "rank_fields": ([],),
    "messages": (),
    "stream": (False,),
    "late_chunking": (False,),
    "lora_request": (),
    "normalize": (True,),
    "use_activation": (True,),
}
_ONE_ANSWER = ChoiceCount(1, 1, use_beam_search=False)


class _PromptFields(msgspec.Struct, kw_only=True):
    """Fields of all three; null means absent."""

    model: str | None = None
    cache_salt: Annotated[str, Meta(max_length=128)] | None = None
    detach_seconds: Annotated[float, Meta(ge=0.0)] | None = None
    timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None
    queue_timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None  # default: class batch


class EmbeddingBody(_PromptFields, kw_only=True):
    input: str | list[str | TokenId | list[TokenId]]
    dimensions: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None


class Document(msgspec.Struct, kw_only=True):
    text: str


class _PairFields(_PromptFields, kw_only=True):
    instruction: str | None = None


class RerankBody(_PairFields, kw_only=True):
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 0, as in vLLM: all
    return_documents: bool | None = None


class ScoreBody(_PairFields, kw_only=True):
    """One text for each of several, or pairs of two lists; `queries` and `documents` are other names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


def parse_embedding(body: JsonBody) -> CompletionRequest:
    fields = body.typed(EmbeddingBody)
    return _request(
        body,
        fields,
        prompt_list(fields.input, "input", MAX_INPUTS),
        "input",
        task=Task.EMBED,
        pooling=Pooling(dimensions=fields.dimensions or 0),
        add_special_tokens=fields.add_special_tokens is not False,
        repeated={"encoding_format": fields.encoding_format or "float"},
    )


def parse_rerank(body: JsonBody) -> CompletionRequest:
    fields = body.typed(RerankBody)
    documents = [document if isinstance(document, str) else document.text for document in fields.documents]
    shown = {} if fields.return_documents is False else {"documents": documents}
    pairs = [(fields.query, document) for document in documents]
    return _scored(body, fields, pairs, "documents", {"top_n": fields.top_n or len(documents), **shown})


def parse_score(body: JsonBody) -> CompletionRequest:
    fields = body.typed(ScoreBody)
    first = _texts(("text_1", fields.text_1), ("queries", fields.queries))
    second = _texts(("text_2", fields.text_2), ("documents", fields.documents))
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second) or not 0 < len(second) <= MAX_INPUTS:
        raise InvalidRequest(
            f"text_1: {len(first)} texts for {len(second)} of text_2; expected one, or as many as in text_2, which has "
            f"1 to {MAX_INPUTS}.",
            param="text_1",
        )
    return _scored(body, fields, list(zip(first, second, strict=True)), "text_2", {})


def _texts(field: tuple[str, str | list[str] | None], other: tuple[str, str | list[str] | None]) -> list[str]:
    """Return the texts of one of two fields of the same meaning."""
    (name, texts), (other_name, other_texts) = field, other
    if (texts is None) == (other_texts is None):
        problem = f"Missing required parameter: {name}." if texts is None else f"{name}: remove it or {other_name}."
        raise (MissingParameter if texts is None else InvalidRequest)(problem, param=name)
    found = other_texts if texts is None else texts
    return [found] if isinstance(found, str) else found or []


def _scored(
    body: JsonBody, fields: _PairFields, pairs: list[tuple[str, str]], param: str, repeated: dict[str, Any]
) -> CompletionRequest:
    instruction = fields.instruction or DEFAULT_INSTRUCTION
    prompts = tuple(
        FilledPrompt(PAIR, {"instruction": instruction, "query": query, "document": document})
        for query, document in pairs
    )
    return _request(body, fields, prompts, param, task=Task.SCORE, num_logprobs=0, repeated=repeated)


def _request(
    body: JsonBody,
    fields: _PromptFields,
    prompts: tuple[Prompt, ...],
    param: str,
    *,
    add_special_tokens: bool = False,
    **task: Any,
) -> CompletionRequest:
    """Return a request whose answer is one token per prompt that is not shown."""
    generation = GenerationFields(
        model=fields.model,
        cache_salt=fields.cache_salt,
        detach_seconds=fields.detach_seconds,
        timeout_seconds=fields.timeout_seconds,
        queue_timeout_seconds=fields.queue_timeout_seconds,
        priority=fields.priority,
        temperature=0.0,
        ignore_eos=True,
    )
    return CompletionRequest(
        model=fields.model,
        prompts=prompts,
        prompt_param=param,
        fields=generation,
        choices=_ONE_ANSWER,
        max_tokens=0,
        max_tokens_param=param,
        default_max_tokens=None,
        stops=(),
        add_special_tokens=add_special_tokens,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        echo=False,
        ignored=check_other_fields(type(fields), body.given, _UNSUPPORTED, NO_EFFECT),
        **task,
    )
