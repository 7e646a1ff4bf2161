"""A sequence as the sampler sees it: how it wants to be sampled, and the tokens that it has. It is itself, by identity,
as long as it runs. Knows nothing of blocks or of schedules. It is used in every step, between the scheduler's batch
and the sampler.
"""

from typing import Protocol

from shared.messages import SamplingParams


class SampledSequence(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def output_token_ids(self) -> list[int]: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...
    @property
    def beam_score(self) -> float: ...
    @property
    def num_beam_candidates(self) -> int: ...
