"""How much of the store one key's requests may hold, and how much a request may write there. Pure.

One key that fills the store closes it for all: admission ends at CLOSE_AT_RATIO (store_memory.py). What counts is what
a request brings, and what it may write: a token takes 11 bytes of a journal, each log-probability beside it 13 more.
Log-probabilities are reserved in full; of plain tokens the first ones, since most answers end long before their limit,
and what they have written is counted as they go on (shared/redis_scripts/account.lua).
"""

from shared.messages import GenerationRequest, SamplingParams
from shared.new_requests import Share

RESERVED_TOKENS = 1024  # of a choice without log-probabilities
TOKEN_BYTES, SCORES_BYTES, SCORE_BYTES = 12, 24, 13  # of a token, of its own log-probability, of each other one


def share_of(owner_key_hash: str, ratio: float, store_bytes: int, num_models: int) -> Share | None:
    """Of one model, each of which counts for itself. None: the store has no limit, or there is nobody to share it with
    (`ratio` 1)."""
    if not store_bytes or ratio >= 1:
        return None
    return Share(owner_key_hash, int(store_bytes * ratio / num_models))


def reserved_bytes(request: GenerationRequest) -> int:
    sampling = request.sampling
    is_plain = sampling.logprobs is None
    num_tokens = sampling.n * (min(sampling.max_tokens, RESERVED_TOKENS) if is_plain else sampling.max_tokens)
    prompt_scores = sampling.prompt_logprobs
    of_prompt = 0 if prompt_scores is None else len(request.prompt_token_ids) * _scores_bytes(prompt_scores)
    return of_prompt + num_tokens * (TOKEN_BYTES + _scores_of_token(sampling))


def _scores_of_token(sampling: SamplingParams) -> int:
    if sampling.logprobs is None:
        return 0
    return _scores_bytes(max(sampling.logprobs, len(sampling.logprob_token_ids)))


def _scores_bytes(count: int) -> int:
    return SCORES_BYTES + SCORE_BYTES * count
