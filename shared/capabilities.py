"""Capability bits: what a request needs of a worker, and what a worker can do.

A rolling upgrade runs workers of several releases on one queue. A worker ignores message fields that it does not know,
so each field that changes the tokens of an answer has a bit here. TAKE compares bits and context lengths (take.lua).
Bits are never reused or given another meaning.
"""

from dataclasses import dataclass
from enum import IntFlag

from shared.messages import ErrorCode, ErrorEvent, GenerationRequest, TerminalEvent

# What a worker without this table answers to a body of protocol version 3. Gateways compare it; do not change it.
UNREADABLE_MESSAGE = "the stored request is unreadable"
NEEDS_NEWER_MESSAGE = "no ready worker has the capabilities of this request"


class Capability(IntFlag):
    """One bit for each group of request fields; at most 31, because Lua compares them as 32-bit integers."""

    ALLOWED_TOKEN_IDS = 1 << 0
    BAD_WORDS = 1 << 1
    LOGPROB_TOKEN_IDS = 1 << 2
    POOLING = 1 << 3


SUPPORTED = int(~Capability(0))  # of this release


@dataclass(frozen=True, slots=True)
class Abilities:
    """What one worker can serve. A worker older than this table has no capabilities."""

    capabilities: int = SUPPORTED
    max_model_len: int = 0  # tokens of prompt and output; 0: not known

    def serve(self, needs: int, context_tokens: int) -> bool:
        """Return whether the worker can run a request with these needs and this many tokens, 0 if unknown."""
        return not needs & ~self.capabilities and (not self.max_model_len or context_tokens <= self.max_model_len)


def needs_of(request: GenerationRequest) -> int:
    """Return the bits of Capability that the request needs."""
    sampling = request.sampling
    needs = 0
    if sampling.allowed_token_ids is not None:
        needs |= Capability.ALLOWED_TOKEN_IDS.value
    if sampling.bad_words:
        needs |= Capability.BAD_WORDS.value
    if sampling.logprob_token_ids:
        needs |= Capability.LOGPROB_TOKEN_IDS.value
    if request.pooling is not None:
        needs |= Capability.POOLING.value
    return needs


def context_tokens_of(request: GenerationRequest) -> int:
    """Return the context length that the request can reach, in tokens."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens


def was_refused_as_unreadable(end: TerminalEvent | None) -> bool:
    """Return whether a worker ended the request because it could not read the body."""
    return isinstance(end, ErrorEvent) and end.code is ErrorCode.REQUEST_FAILED and end.message == UNREADABLE_MESSAGE
