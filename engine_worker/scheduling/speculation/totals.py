"""Counts of drafts since the start. vLLM counts the same."""

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class SpeculationTotals:
    drafts: int = 0  # sequences that drafted, summed over the steps
    draft_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=lambda: [0])  # by place in the draft

    @classmethod
    def of(cls, max_drafts: int) -> "SpeculationTotals":
        return cls(accepted_by_position=[0] * max_drafts)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of one sequence and step."""
        self.drafts += 1
        self.draft_tokens += num_drafts
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1

    def copy(self) -> "SpeculationTotals":
        return replace(self, accepted_by_position=list(self.accepted_by_position))
