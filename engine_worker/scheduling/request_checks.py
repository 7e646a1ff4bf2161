"""Checks whether this worker can compute a request.

The gateway has validated it before, but a worker may have lower limits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from engine_worker.kv.span import KVSpans
from shared.messages import ErrorCode, GenerationRequest, SamplingParams, StoredChoice


class RequestRefused(ValueError):
    """The request cannot run on this worker; `code` and the message are sent to its client."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    vocab_size: int
    max_model_len: int
    capacity_blocks: int  # of this worker's KV cache
    spans: KVSpans  # the blocks of a sequence per group of layers
    max_beam_width: int
    has_states: bool = False  # the model has recurrent states


def check_request(request: GenerationRequest, stored: Sequence[StoredChoice], limits: RequestLimits) -> None:
    """Raise RequestRefused with the first problem of a request and its stored choices."""
    for problem in _problems(request, stored, limits):
        raise RequestRefused(ErrorCode.INVALID_REQUEST, problem)
    for problem in _shortages(request, limits):
        raise RequestRefused(ErrorCode.CAPACITY_EXCEEDED, problem)


def _shortages(request: GenerationRequest, limits: RequestLimits) -> Iterator[str]:
    """Yield what an otherwise idle worker lacks. Beams share the prompt's full blocks."""
    num_sequences = request.sampling.beam_width if request.sampling.use_beam_search else 1
    num_prompt = len(request.prompt_token_ids)
    needed_blocks = limits.spans.max_blocks(num_prompt + 1, num_prompt, num_sequences)
    if needed_blocks > limits.capacity_blocks:
        each = "" if num_sequences == 1 else f" of each of {num_sequences} sequences"
        size, has = limits.spans.block_size, limits.capacity_blocks
        yield f"the prompt and one token{each} need {needed_blocks} KV blocks of {size} tokens; this worker has {has}"


def _problems(request: GenerationRequest, stored: Sequence[StoredChoice], limits: RequestLimits) -> Iterator[str]:
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        yield "prompt_token_ids is empty"
    if num_prompt + 1 > limits.max_model_len:
        yield f"the prompt has {num_prompt} tokens; one token more exceeds max_model_len, {limits.max_model_len}"
    sampling = request.sampling
    for name, token_ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("resumed_token_ids", [token_id for choice in stored for token_id in choice.token_ids]),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words", [token_id for word in sampling.bad_words for token_id in word]),
        ("logprob_token_ids", sampling.logprob_token_ids),
    ):
        if (token_id := _first_outside(token_ids, limits.vocab_size)) is not None:
            yield f"{name} holds {token_id}; token ids of this model are 0..{limits.vocab_size - 1}"
    if not 0.0 < request.tenant_weight < inf:
        yield f"tenant_weight is {request.tenant_weight}; it must be finite and above 0"
    yield from _sampling_problems(sampling)
    yield from _choice_problems(sampling, limits)


def _first_outside(token_ids: Iterable[int], vocab_size: int) -> int | None:
    return next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)


def _choice_problems(sampling: SamplingParams, limits: RequestLimits) -> Iterator[str]:
    if sampling.n < 1:
        yield f"n is {sampling.n}; it must be at least 1"
    if sampling.use_beam_search:
        yield from _beam_problems(sampling, limits)


def _beam_problems(sampling: SamplingParams, limits: RequestLimits) -> Iterator[str]:
    if limits.has_states:
        yield "use_beam_search: not supported by models with recurrent states"
    for name in ("grammar", "allowed_token_ids", "bad_words", "logprob_token_ids"):
        if getattr(sampling, name):
            yield f"{name}: not supported with beam search"
    if sampling.beam_width > limits.max_beam_width:
        yield f"beam_width is {sampling.beam_width}; this worker computes at most {limits.max_beam_width} beams"
    if sampling.beam_width < sampling.n:
        yield f"beam_width is {sampling.beam_width}; it must be at least n, {sampling.n}"
    # The first step selects from the continuations of one sequence; end-of-sequence ids need additional candidates.
    num_candidates = max(2, 1 + len(sampling.stop_token_ids)) * sampling.beam_width
    if num_candidates > limits.vocab_size:
        yield f"beam_width is {sampling.beam_width}; the model has only {limits.vocab_size} tokens to choose from"
    if not sampling.is_greedy:
        yield f"temperature is {sampling.temperature}; it must be 0 with beam search"
    if sampling.prompt_logprobs is not None:
        yield "prompt_logprobs: not supported with beam search"
    if not isfinite(sampling.length_penalty):
        yield f"length_penalty is {sampling.length_penalty}; it must be finite"


def _sampling_problems(sampling: SamplingParams) -> Iterator[str]:
    if sampling.max_tokens < 1:
        yield f"max_tokens is {sampling.max_tokens}; it must be at least 1"
    ranges = (  # name, lowest, highest allowed
        ("min_tokens", 0, sampling.max_tokens),
        ("top_k", 0, inf),
        ("min_p", 0.0, 1.0),
        ("temperature", 0.0, inf),
        ("presence_penalty", -inf, inf),
        ("frequency_penalty", -inf, inf),
    )
    for name, lowest, highest in ranges:
        value = getattr(sampling, name)
        if not isfinite(value) or not lowest <= value <= highest:
            yield f"{name} is {value}; it must be finite and within {lowest}..{highest}"
    if not 0.0 < sampling.top_p <= 1.0:
        yield f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if not 0.0 < sampling.repetition_penalty < inf:
        yield f"repetition_penalty is {sampling.repetition_penalty}; it must be finite and above 0"
    if sampling.grammar is not None and (sampling.ignore_eos or sampling.min_tokens):
        yield "grammar: not supported with ignore_eos or min_tokens, because the grammar ends the output"
    if sampling.allowed_token_ids == ():
        yield "allowed_token_ids is empty: no token could be sampled"
    if not all(sampling.bad_words):
        yield "bad_words holds a word without tokens"
    if not all(isfinite(bias) for bias in sampling.logit_bias.values()):
        yield "logit_bias holds a value that is not finite"
