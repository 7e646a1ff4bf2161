"""The requests that this worker incarnation has claimed and not yet finished. (Signatures first.)"""

from dataclasses import dataclass

from shared.messages import GenerationRequest


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    request: GenerationRequest
    journal_token_ids: list[int]  # tokens of earlier attempts: the engine continues behind them
    gateway_id: str
    attempt: int
    queue: str
    entry_id: bytes
    solo: bool  # suspected of crashing workers: runs alone
