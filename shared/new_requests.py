"""The arguments of ACCEPT for a request: its stored form, its retention, and the limits of its API key. Pure."""

from dataclasses import dataclass

from shared.capabilities import context_tokens_of, needs_of
from shared.messages import GenerationRequest, encode_request

RETAINED_SECONDS = 600  # time to live of r and j after the end, for late readers
GRACE_SECONDS = 60  # time that a request continues without its gateway, by default
PROLONG_SECONDS = 60  # interval in which a gateway extends the life of a kept answer's parts


@dataclass(frozen=True, slots=True)
class RetentionTerms:
    """The terms of a kept request, which clients can attach to and read after its end."""

    record: bytes  # data with which a gateway can answer it again; not empty
    holder: str  # random name of its first holder
    owner_key_hash: str = ""  # API key that may attach to it
    grace_seconds: int = GRACE_SECONDS  # time that it continues without the gateways of all its holders
    name: str = ""  # the client's name for it, a digest as in RedisKeys.client_name()
    fingerprint: str = ""  # of the request that the client sent under that name
    stale_id: str = ""  # id of a request that is gone and may be replaced under the name

    @property
    def name_seconds(self) -> int:
        """Return the time to live of the name, which PROLONG extends.

        If the last holder's gateway dies, the answer continues for its grace time and can be read for RETAINED_SECONDS.
        PROLONG_SECONDS count twice, because one extension may be late.
        """
        return RETAINED_SECONDS + self.grace_seconds + 2 * PROLONG_SECONDS


@dataclass(frozen=True, slots=True)
class NewRequest:
    request_id: str
    body: bytes
    journal: bytes = b""  # tokens that its client already has
    terms: RetentionTerms | None = None
    reserved_bytes: int = 0  # maximum of bytes in its journal
    num_prompt_tokens: int = 0  # 0: not known
    num_choices: int = 1
    needs: int = 0  # bits of capabilities.py
    context_tokens: int = 0  # maximum of prompt and output; 0: not known
    prefix_key: bytes = b""  # requests with equal keys prefer the same worker; b"": no preference

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        *,
        journal: bytes = b"",
        terms: RetentionTerms | None = None,
        reserved_bytes: int = 0,
        prefix_key: bytes = b"",
    ) -> "NewRequest":
        """Return the stored form of a request, with the capabilities that it needs."""
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
            prefix_key=prefix_key,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """The limits of the API key that sent the requests: order, queue places, and bytes in the store."""

    owner_key_hash: str  # '': without a key
    max_bytes: int | None = None  # of all its requests together; None: no limit
    weight: float = 1.0  # relative to other keys
    divides_queue: bool = False  # whether the queue places of keys are limited (shares.py)
