"""How many more requests a worker should claim: those that the next two steps can start, and a few spare ones.

All other requests stay in the queue, where every worker, cancellation, and timeout can reach them. Two steps, because
the first is already being computed while the claim is under way. The queue entry contains the prompt length. The cached
part of a prompt, and a length that the entry lacks, are estimated from recent prompts and corrected on arrival.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from engine_worker.kv.sequence import Sequence
from engine_worker.kv.span import KVSpans
from engine_worker.scheduling.scheduler_config import SchedulerConfig
from engine_worker.scheduling.sequence_group import SequenceGroup
from engine_worker.scheduling.step_plan import MAX_PROMPT_LOGPROBS

STEPS_AHEAD = 2
SLOTS_PER_SPARE_REQUEST = 32  # one request per 32 slots waits here, because stop tokens end others without warning
WEIGHT = 1 / 8  # of the newest prompt in the averages
# The part of a prompt that counts as computed at least: the next prompt may not be cached, and the lookup takes time.
MIN_COMPUTED_RATIO = 1 / 2


@dataclass(frozen=True, slots=True)
class ClaimBudget:
    """The room for requests of one class between two steps."""

    room: int  # requests for which there are slots and blocks, after those that wait; below 0: too few even for those
    tokens: float  # prompt tokens that the next steps can compute, after those that wait
    spare: int  # additional requests that may wait for slots about to become free
    request_tokens: float  # expected tokens that a request's prompt needs to compute
    computed_ratio: float  # expected computed tokens / prompt tokens
    num_others: int = 0  # additional requests that may wait, of tenants without waiting requests here
    waiting_tenants: frozenset[str] = frozenset()  # tenants with waiting requests here

    def max_requests(self, num_added: int, num_added_prompt_tokens: int) -> int:
        """Return the upper bound of requests to claim; num_wanted_tokens() bounds their prompts.

        Args:
            num_added: Claimed requests that have not reached the engine.
            num_added_prompt_tokens: The prompt tokens of these.
        """
        return max(0, self.room + self.spare - num_added) if self._tokens_beside(num_added_prompt_tokens) > 0 else 0

    def num_wanted(self, num_added: int, num_added_prompt_tokens: int) -> int:
        """Return the requests to claim if their prompt lengths are unknown. Arguments as in max_requests()."""
        tokens = self._tokens_beside(num_added_prompt_tokens)
        num_startable = ceil(tokens / self.request_tokens) if tokens > 0 else 0
        return max(0, min(self.room + self.spare - num_added, num_startable))

    def num_wanted_tokens(self, num_added_prompt_tokens: int) -> int:
        """Return the prompt tokens after which claiming stops; the last prompt may exceed them."""
        return ceil(
            max(0.0, self._tokens_beside(num_added_prompt_tokens)) / max(MIN_COMPUTED_RATIO, self.computed_ratio)
        )

    @property
    def likely_prompt_tokens(self) -> int:
        """The assumed length of a prompt whose queue entry has none."""
        return ceil(self.request_tokens / max(MIN_COMPUTED_RATIO, self.computed_ratio))

    def _tokens_beside(self, num_added_prompt_tokens: int) -> float:
        return self.tokens - num_added_prompt_tokens * self.computed_ratio


NO_CLAIMS = ClaimBudget(room=0, tokens=0.0, spare=0, request_tokens=1.0, computed_ratio=1.0)


class PrefillEstimator:
    """Estimates prefill work from recent prompts: their mean length, and the part that was not cached.

    The cached part is weighted by tokens, because many short cached prompts predict nothing about a long one.
    """

    def __init__(self, config: SchedulerConfig, spans: KVSpans) -> None:
        """Create the estimator. `spans`: the blocks of a sequence per group of layers."""
        self._begun: dict[bool, list[Sequence]] = {False: [], True: []}  # prompts in chunks, by is_background
        self._block_size = spans.block_size
        self._block_limits = [span.max_blocks(config.max_model_len) for span in spans.groups]
        self._num_spare_requests = config.max_num_seqs // SLOTS_PER_SPARE_REQUEST
        self._ending: set[Sequence] = set()  # sequences that the next steps end by length
        self._prompt_tokens = config.max_num_batched_tokens / 4  # before the first prompt
        self._has_seen_one = False
        self._admitted_tokens = self._computed_tokens = 0.0  # moving averages per admitted prompt

    def scheduling(self, interactive: Iterable[Sequence], background: Iterable[Sequence]) -> None:
        """Start scheduling a step. The arguments are sequences whose prompts are partly computed."""
        self._begun = {False: list(interactive), True: list(background)}

    def begun(self, sequence: Sequence, *, is_background: bool) -> None:
        """Record a sequence whose prompt starts in the step being scheduled."""
        self._begun[is_background].append(sequence)

    def advanced(self, sequence: Sequence) -> None:
        """Record a new token of a sequence."""
        if len(sequence.output_token_ids) + STEPS_AHEAD >= sequence.sampling.max_tokens:
            self._ending.add(sequence)

    def ended(self, sequences: Iterable[Sequence]) -> None:
        """Record sequences that ended."""
        self._ending.difference_update(sequences)

    def added(self, group: SequenceGroup) -> None:
        """Record a new request."""
        weight = WEIGHT if self._has_seen_one else 1.0
        self._prompt_tokens += (group.num_prompt_tokens - self._prompt_tokens) * weight
        self._has_seen_one = True

    def admitted(self, group: SequenceGroup) -> None:
        """Record the first admission of a request."""
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
        """Return the claim budget of one class.

        Args:
            waiting: Groups that go before a new request of the class.
            free_slots: Running slots.
            spare_blocks: KV blocks for new sequences.
            budget_tokens: Prompt tokens per step.
            is_background: Whether the class is the background one.
        """
        ratio = self._computed_tokens / self._admitted_tokens if self._admitted_tokens else 1.0
        request_tokens = max(1.0, self._prompt_tokens * ratio)
        needs = [(_num_slots(group, free_slots), group.sequences[0]) for group in waiting]
        waiting_blocks = sum(self._blocks_of(first.num_uncomputed_tokens * ratio) for _, first in needs)
        begun = [*self._begun[False], *(self._begun[True] if is_background else ())]
        soon = _num_soon_computed([*begun, *(first for _, first in needs)])
        begun_tokens, waiting_tokens = sum(soon[: len(begun)]), sum(soon[len(begun) :]) * ratio
        blocks = spare_blocks - len(needs) * len(self._block_limits) - waiting_blocks
        blocks_each = len(self._block_limits) + self._blocks_of(request_tokens)
        room = min(free_slots - sum(slots for slots, _ in needs), ceil(blocks / blocks_each))
        return ClaimBudget(
            room=room,
            tokens=STEPS_AHEAD * budget_tokens - begun_tokens - waiting_tokens,
            spare=0 if is_background else self._num_spare_requests + len(self._ending),
            request_tokens=request_tokens,
            computed_ratio=ratio,
        )

    def _blocks_of(self, num_tokens: float) -> float:
        return sum(min(num_tokens / self._block_size, limit) for limit in self._block_limits)


def _num_slots(group: SequenceGroup, free_slots: int) -> int:
    """Return the slots to reserve for `group`; for beams that wait for more than are free, those owed to them."""
    is_short = group.sampling.use_beam_search and group.num_slots_to_start > free_slots
    return group.num_owed_slots if is_short else group.num_slots_to_start


def _num_soon_computed(sequences: Iterable[Sequence]) -> list[int]:
    """Return the prompt tokens of each that two steps can compute; prompt logprobs limit them."""
    found, logprobs_left = list[int](), STEPS_AHEAD * MAX_PROMPT_LOGPROBS
    for sequence in sequences:
        num_tokens = max(0, sequence.num_uncomputed_tokens - 1)  # the last one counts as a decode
        if logprobs_each := sequence.num_logprobs_of_prompt_token:
            num_tokens = min(num_tokens, logprobs_left // logprobs_each)
            logprobs_left -= num_tokens * logprobs_each
        found.append(num_tokens)
    return found
