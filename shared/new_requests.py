"""The request as ACCEPT is told of it: whether and for whom it is kept, what its key may hold in the store. Pure.

It is the last step of a chat's way in at the gateway. It knows no body.
"""

from dataclasses import dataclass

from shared.capabilities import context_tokens_of, needs_of
from shared.messages import GenerationRequest, encode_request

RETAINED_SECONDS = 600  # r and j after the end, for late readers; clean-up only, no decision hangs on it
GRACE_SECONDS = 60  # how long a request outlives its gateway, unless it says more
PROLONG_SECONDS = 60  # how often a gateway says that a kept answer goes on, whose parts would expire otherwise


@dataclass(frozen=True, slots=True)
class RetentionTerms:
    """The mark of a request that is kept: it can be attached to, and read after its end."""

    record: bytes  # whatever a gateway needs to answer it again; not empty
    holder: str  # who holds it first: a random name
    owner_key_hash: str = ""  # who may attach to it
    grace_seconds: int = GRACE_SECONDS  # how long it outlives the gateways of all its holders
    name: str = ""  # the client's name for it, as RedisKeys.client_name has it
    fingerprint: str = ""  # of what the client asked under that name
    stale_id: str = ""  # what the name may stand for so far, as that request is gone

    @property
    def name_seconds(self) -> int:
        """How long the name is kept unless it is prolonged: that may end with the last holder's gateway, and the answer
        then goes on for its grace and can be given for RETAINED_SECONDS. Twice PROLONG_SECONDS, as one may be late."""
        return RETAINED_SECONDS + self.grace_seconds + 2 * PROLONG_SECONDS


@dataclass(frozen=True, slots=True)
class NewRequest:
    request_id: str
    body: bytes
    journal: bytes = b""  # of tokens that its client already has
    terms: RetentionTerms | None = None
    reserved_bytes: int = 0  # that it may write into its journal
    num_prompt_tokens: int = 0  # 0: nobody says
    num_choices: int = 1
    needs: int = 0  # bits of capabilities.py
    context_tokens: int = 0  # of prompt and output; 0: not known

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        *,
        journal: bytes = b"",
        terms: RetentionTerms | None = None,
        reserved_bytes: int = 0,
    ) -> "NewRequest":
        """The stored form of a request, with what it needs of a worker."""
        needs = needs_of(request)
        return cls(
            request.request_id,
            encode_request(request, needs),
            journal,
            terms,
            reserved_bytes,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_choices=request.sampling.n,
            needs=needs,
            context_tokens=context_tokens_of(request),
        )


@dataclass(frozen=True, slots=True)
class Share:
    """The share of the API key that an answer's requests belong to: turns, queue places, a part of the store."""

    owner_key_hash: str  # '': of those who have none
    max_bytes: int | None = None  # of all its requests together; None: as much as there is
    weight: float = 1.0  # relative to other keys
    divides_queue: bool = False  # whether queue places are divided between keys (shares.py)
