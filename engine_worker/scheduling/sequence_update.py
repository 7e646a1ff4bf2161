"""What the scheduler tells the engine about a sequence after each step."""

from dataclasses import dataclass, field

from engine_worker.scheduling.sequence import Sequence
from engine_worker.scheduling.sequence_group import SequenceGroup
from shared.messages import FinishReason, TokenLogprobs


@dataclass(slots=True)  # not frozen, which takes three times as long: one is made for each token
class SequenceUpdate:
    """What one step did to one sequence. It has ended if there is a `finish_reason` or an `error`.

    A beam search gives updates without tokens until it is over; then one for each answer, with all its tokens.
    """

    sequence: Sequence
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    new_logprobs: list[TokenLogprobs] | None = None  # one a token, if the request asks for them
    ended_group: SequenceGroup | None = None  # set if the whole request is complete with this update

    @property
    def index(self) -> int:
        """Of the first new token in the output. A beam search has no output before its end."""
        if self.sequence.sampling.use_beam_search:
            return 0
        return self.sequence.num_output_tokens - len(self.new_token_ids)
