"""Counts of drafts since the start. vLLM counts the same."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationTotals:
    """The lists are by place in the draft: the first token after the known ones, the second, ..."""

    drafts: int = 0  # sequences that drafted, summed over the steps
    drafted: list[int] = field(default_factory=lambda: [0])
    accepted: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def of(cls, max_drafts: int) -> "SpeculationTotals":
        return cls(drafted=[0] * max_drafts, accepted=[0] * max_drafts)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of one sequence and step."""
        self.drafts += 1
        for place in range(num_drafts):
            self.drafted[place] += 1
            self.accepted[place] += place < num_accepted

    def copy(self) -> "SpeculationTotals":
        return SpeculationTotals(self.drafts, list(self.drafted), list(self.accepted))
