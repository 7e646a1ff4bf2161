"""What a maker of drafts must know of a step, as a plain value beside its StepDescription."""

from dataclasses import dataclass

from engine_worker.execution.step.step_description import Int32Array
from engine_worker.scheduling.batch import Sequence


@dataclass(frozen=True, slots=True)
class DraftDescription:
    """What a maker must know of a step; see kernels/draft_inputs_reference.py:SampledStep.

    Attributes:
        following: [S] int32.
        first_samples: [Q] int32.
        last_samples: [Q] int32.
        table_rows: [Q] int32, a row of S with all blocks of the sequence.
        drafting: The Q sequences; empty on other ranks than 0.
        max_seq_len: Of the passes after the first one, in tokens.
        step: Its number.
    """

    following: Int32Array
    first_samples: Int32Array
    last_samples: Int32Array
    table_rows: Int32Array
    drafting: list[Sequence]
    max_seq_len: int
    step: int

    @property
    def num_drafting(self) -> int:
        return len(self.first_samples)
