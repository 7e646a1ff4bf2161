"""How many requests more a worker should claim: what the next two steps can start, and a few for the next free seats.

All others wait in the queue, where every worker, a cancel and a time-out find them. The first of the two steps is being
computed while the claim is under way, so with less the second could find nothing. How long a prompt is the queue tells;
what of it is in the cache, and how long one is of which it does not tell, is guessed from those before, and counted as
soon as it is here. A takeover, and every other claim, asks here first. It knows counts, no request's content and no
store.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from engine_worker.scheduling.scheduler_config import SchedulerConfig
from engine_worker.scheduling.sequence import Sequence
from engine_worker.scheduling.sequence_group import SequenceGroup
from engine_worker.scheduling.step_plan import MAX_PROMPT_LOGPROBS

STEPS_AHEAD = 2
SLOTS_PER_SPARE_REQUEST = (
    32  # for each of so many seats a request waits here, as nobody foresees an end by a stop token
)
WEIGHT = 1 / 8  # of the newest prompt in the averages
# Of a prompt, counted as computed whatever the cache had of late: the next may not be in it, and looking takes time.
MIN_COMPUTED_RATIO = 1 / 2


@dataclass(frozen=True, slots=True)
class ClaimBudget:
    """The room for requests of one class, at one moment between two steps."""

    room: int  # requests for which there are seats and blocks beside those that wait; below 0: not for all of those
    tokens: float  # of prompts, that the next steps can compute beside what waits
    spare: int  # requests more that may wait, for seats that are about to be free
    request_tokens: float  # that the prompt of a request is likely to compute
    computed_ratio: float  # of its tokens
    num_others: int = 0  # requests that may wait beside those, of tenants of which none waits
    waiting_tenants: frozenset[str] = frozenset()  # of which requests wait here

    def max_requests(self, num_added: int, num_added_prompt_tokens: int) -> int:
        """Requests to claim when so many are on their way to the engine already, as far as their prompts allow: no more
        than num_wanted_tokens() in all."""
        return max(0, self.room + self.spare - num_added) if self._tokens_beside(num_added_prompt_tokens) > 0 else 0

    def num_wanted(self, num_added: int, num_added_prompt_tokens: int) -> int:
        """Requests to claim where nobody knows their prompts before."""
        tokens = self._tokens_beside(num_added_prompt_tokens)
        num_startable = ceil(tokens / self.request_tokens) if tokens > 0 else 0
        return max(0, min(self.room + self.spare - num_added, num_startable))

    def num_wanted_tokens(self, num_added_prompt_tokens: int) -> int:
        """The prompt tokens that are enough to claim; the last prompt may have more."""
        return ceil(
            max(0.0, self._tokens_beside(num_added_prompt_tokens)) / max(MIN_COMPUTED_RATIO, self.computed_ratio)
        )

    @property
    def likely_prompt_tokens(self) -> int:
        """The part in num_wanted_tokens() of a prompt of which the queue does not tell."""
        return ceil(self.request_tokens / max(MIN_COMPUTED_RATIO, self.computed_ratio))

    def _tokens_beside(self, num_added_prompt_tokens: int) -> float:
        return self.tokens - num_added_prompt_tokens * self.computed_ratio


NO_CLAIMS = ClaimBudget(room=0, tokens=0.0, spare=0, request_tokens=1.0, computed_ratio=1.0)


class PrefillEstimator:
    """Knows the prompts of late: their mean length, and the share of their tokens that the prefix cache lacked. By
    tokens, as many short prompts that it had say nothing of a long one."""

    def __init__(self, config: SchedulerConfig, block_size: int, max_blocks_each: int) -> None:
        """`max_blocks_each`: that any sequence holds at one time."""
        self._begun: dict[bool, list[Sequence]] = {False: [], True: []}  # prompts in chunks, by whether of `batch`
        self._block_size = block_size
        self._max_blocks_each = max_blocks_each
        self._num_spare_requests = config.max_num_seqs // SLOTS_PER_SPARE_REQUEST
        self._ending: set[Sequence] = set()  # have so few tokens left that the next steps end them
        self._prompt_tokens = config.max_num_batched_tokens / 4  # until there is one
        self._has_seen_one = False
        self._admitted_tokens = self._computed_tokens = 0.0  # of the prompts admitted of late, on average

    def scheduling(self, interactive: Iterable[Sequence], background: Iterable[Sequence]) -> None:
        """A step is being scheduled in which these have more of their prompts to compute."""
        self._begun = {False: list(interactive), True: list(background)}

    def begun(self, sequence: Sequence, *, is_background: bool) -> None:
        """In the step that is being scheduled."""
        self._begun[is_background].append(sequence)

    def advanced(self, sequence: Sequence) -> None:
        """By a token."""
        if len(sequence.output_token_ids) + STEPS_AHEAD >= sequence.sampling.max_tokens:
            self._ending.add(sequence)

    def ended(self, sequences: Iterable[Sequence]) -> None:
        self._ending.difference_update(sequences)

    def added(self, group: SequenceGroup) -> None:
        weight = WEIGHT if self._has_seen_one else 1.0
        self._prompt_tokens += (group.num_prompt_tokens - self._prompt_tokens) * weight
        self._has_seen_one = True

    def admitted(self, group: SequenceGroup) -> None:
        """For the first time."""
        weight = WEIGHT if self._admitted_tokens else 1.0
        self._admitted_tokens += (group.num_prompt_tokens - self._admitted_tokens) * weight
        num_computed = group.num_prompt_tokens - group.num_cached_tokens
        self._computed_tokens += (num_computed - self._computed_tokens) * weight

    def claim_budget(
        self,
        waiting: Iterable[SequenceGroup],
        free_slots: int,
        spare_blocks: int,
        budget_tokens: int,
        *,
        is_background: bool = False,
    ) -> ClaimBudget:
        """`waiting`: those before a new one of the class; `budget_tokens`: of prompts, in a step."""
        ratio = self._computed_tokens / self._admitted_tokens if self._admitted_tokens else 1.0
        request_tokens = max(1.0, self._prompt_tokens * ratio)
        needs = [(_num_slots(group, free_slots), group.sequences[0]) for group in waiting]
        waiting_blocks = sum(self._blocks_of(first.num_uncomputed_tokens * ratio) for _, first in needs)
        begun = [*self._begun[False], *(self._begun[True] if is_background else ())]
        soon = _num_soon_computed([*begun, *(first for _, first in needs)])
        begun_tokens, waiting_tokens = sum(soon[: len(begun)]), sum(soon[len(begun) :]) * ratio
        blocks = spare_blocks - len(needs) - waiting_blocks
        blocks_each = 1 + self._blocks_of(request_tokens)
        room = min(free_slots - sum(slots for slots, _ in needs), ceil(blocks / blocks_each))
        return ClaimBudget(
            room=room,
            tokens=STEPS_AHEAD * budget_tokens - begun_tokens - waiting_tokens,
            spare=0 if is_background else self._num_spare_requests + len(self._ending),
            request_tokens=request_tokens,
            computed_ratio=ratio,
        )

    def _blocks_of(self, num_tokens: float) -> float:
        return min(num_tokens / self._block_size, self._max_blocks_each)


def _num_slots(group: SequenceGroup, free_slots: int) -> int:
    """Return the slots that requests after `group` leave it: of beams that wait for more, those that they are owed."""
    is_short = group.sampling.use_beam_search and group.num_slots_to_start > free_slots
    return group.num_owed_slots if is_short else group.num_slots_to_start


def _num_soon_computed(sequences: Iterable[Sequence]) -> list[int]:
    """The tokens of each that two steps compute if there is room: of prompts that are scored they may be few."""
    found, logprobs_left = list[int](), STEPS_AHEAD * MAX_PROMPT_LOGPROBS
    for sequence in sequences:
        num_tokens = max(0, sequence.num_uncomputed_tokens - 1)  # the last one is computed beside the output's
        if logprobs_each := sequence.num_logprobs_of_prompt_token:
            num_tokens = min(num_tokens, logprobs_left // logprobs_each)
            logprobs_left -= num_tokens * logprobs_each
        found.append(num_tokens)
    return found
