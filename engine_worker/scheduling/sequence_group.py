"""The sequences of one request, its choices or beams, which share the KV of their prompt.

    sequences   those that have not ended, by index
    active      those that run: they hold blocks and a running slot, in the order in which they got them

The first sequence computes the prompt; the others fork from it. Each is admitted and preempted separately, so a request
needs one slot to start. Beams are compared with each other in every step, so they are admitted and preempted together.
Shared blocks are copied before a write.
"""

from collections.abc import Iterable

from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.kv.sequence import BeamCandidate, Sequence, SequenceStatus
from engine_worker.scheduling.beam_search import BeamSearch, Hypothesis
from engine_worker.scheduling.running_slots import Tenant

NO_TENANT = Tenant()


class SequenceGroup:
    """The sequences of one request."""

    def __init__(
        self,
        sequences: list[Sequence],
        num_ended_tokens: int = 0,
        *,
        is_background: bool = False,
        tenant: Tenant = NO_TENANT,
    ) -> None:
        """Create the group of a request.

        Args:
            sequences: At least one, all of one request.
            num_ended_tokens: Output tokens of choices that ended at an earlier owner.
            is_background: Whether it yields to interactive requests.
            tenant: The API key that it counts for.
        """
        first = sequences[0]
        self.request_id = first.request_id
        self.is_background = is_background
        self.tenant = tenant
        self.sampling = first.sampling
        self.num_prompt_tokens = first.num_prompt_tokens
        self.sequences = sequences
        self.active: list[Sequence] = []
        # All beams start together; otherwise one sequence is enough.
        self.num_slots_to_start = first.sampling.beam_width if first.sampling.use_beam_search else 1
        self.num_owed_slots = 0  # of waiting beams: slots that later requests leave free
        self.arrival = 0  # the order in which requests were queued
        self.has_started = False
        self.num_preemptions = 0  # of the group, or of one of its sequences
        self.num_cached_tokens = 0  # prompt tokens found in the cache at the first admission
        self.max_num_tokens = 0  # the maximum length of its sequences; set when it is queued
        self.beam_search: BeamSearch | None = None
        self._num_ended_tokens = num_ended_tokens

    @property
    def is_complete(self) -> bool:
        """Whether all of its sequences run."""
        return len(self.active) == len(self.sequences)

    @property
    def num_slots(self) -> int:
        """The running slots that the group holds."""
        return self.num_slots_to_start if self.active and self.sampling.use_beam_search else len(self.active)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was computed for it on this worker."""
        return not self.has_started

    @property
    def is_swapped(self) -> bool:
        """Whether it has KV in host memory."""
        return any(sequence.status is SequenceStatus.SWAPPED for sequence in self.sequences)

    @property
    def next_waiting(self) -> Sequence:
        """The sequence to admit next. At least one must wait."""
        return next(sequence for sequence in self.sequences if sequence.status is not SequenceStatus.RUNNING)

    @property
    def newest(self) -> list[Sequence]:
        """The sequences that are preempted together: the one admitted last, or all beams."""
        return list(self.active) if self.sampling.use_beam_search else self.active[-1:]

    @property
    def is_pinned(self) -> bool:
        """Whether its newest sequence was preempted more than once and got no token since."""
        return self.active[0 if self.sampling.use_beam_search else -1].is_pinned

    @property
    def num_output_tokens(self) -> int:
        """The output tokens of all choices, including ended ones."""
        return self._num_ended_tokens + sum(sequence.num_output_tokens for sequence in self.sequences)

    @property
    def may_decode(self) -> bool:
        """Whether its sequences may decode. Beams wait until all of them lack one token, to be compared."""
        if not self.sampling.use_beam_search:
            return True
        return self.is_complete and all(sequence.num_uncomputed_tokens == 1 for sequence in self.active)

    def num_prefill_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that `sequence` lacks, except the last of a preempted beam: all beams sample together.

        While the others wait, the first beam stops at the end of the prompt, where they fork. Beyond it, in groups with
        a window, it would leave a block that they share and are going to write.
        """
        if not self.sampling.use_beam_search or not sequence.num_output_tokens:
            return sequence.num_uncomputed_tokens
        num_computed = sequence.kv.num_computed_tokens
        is_fork_due = not self.is_complete and num_computed < self.num_prompt_tokens
        return (self.num_prompt_tokens if is_fork_due else sequence.num_tokens - 1) - num_computed

    def activate(self, sequence: Sequence) -> None:
        """Mark `sequence`, which has its blocks, as running."""
        sequence.status = SequenceStatus.RUNNING
        self.active.append(sequence)
        self.has_started = True

    def preempted(self, sequences: list[Sequence], *, is_swap: bool) -> None:
        """Mark sequences as preempted. Their blocks are free."""
        self.num_preemptions += 1
        for sequence in sequences:
            sequence.status = SequenceStatus.SWAPPED if is_swap else SequenceStatus.WAITING
        self.active = [other for other in self.active if other.status is SequenceStatus.RUNNING]

    def end_sequence(self, sequence: Sequence) -> None:
        """Remove an ended sequence. Its blocks are free."""
        self._num_ended_tokens += sequence.num_output_tokens
        sequence.status = SequenceStatus.FINISHED
        self.sequences = [other for other in self.sequences if other is not sequence]
        self.active = [other for other in self.active if other is not sequence]

    def end(self) -> None:
        """End all remaining sequences. Their blocks are free."""
        for sequence in self.sequences:
            sequence.status = SequenceStatus.FINISHED
        self.sequences, self.active = [], []

    def end_search(self, beam: Sequence, answers: Iterable[Hypothesis]) -> list[Sequence]:
        """Return the answers of an ended search, best first, as sequences like `beam`, one of its beams."""
        ended = []
        for index, answer in enumerate(answers):
            sequence = _like(beam, answer.token_ids, SequenceStatus.FINISHED)
            sequence.sequence_index = index
            self._num_ended_tokens += sequence.num_output_tokens
            ended.append(sequence)
        return ended

    def move_beams(self, moves: Iterable[BeamCandidate], kv_cache: KVAllocator) -> None:
        """Continue each move's beam by its token, in the order of the moves. Beams without a move are dropped.

        The first move of a beam uses the beam itself; each further one uses a fork that shares all its blocks.
        """
        moved: list[tuple[Sequence, BeamCandidate]] = []
        taken: set[int] = set()
        for move in moves:
            beam = self.active[move.beam]
            moved.append((_fork(beam, kv_cache) if move.beam in taken else beam, move))
            taken.add(move.beam)
        for place, beam in enumerate(self.active):
            if place not in taken:
                kv_cache.free(beam)
                beam.status = SequenceStatus.FINISHED
        for beam, move in moved:  # after the forks, which copy the previous tokens
            beam.output_token_ids.append(move.token_id)
            beam.beam_score = move.score
        self.sequences = [beam for beam, _ in moved]
        self.active = list(self.sequences)


def _fork(parent: Sequence, kv_cache: KVAllocator) -> Sequence:
    child = _like(parent, list(parent.output_token_ids), SequenceStatus.RUNNING)
    kv_cache.fork(parent, child, parent.kv.num_computed_tokens)
    return child


def _like(sequence: Sequence, output_token_ids: list[int], status: SequenceStatus) -> Sequence:
    return Sequence(
        request_id=sequence.request_id,
        prompt_token_ids=sequence.prompt_token_ids,
        sampling=sequence.sampling,
        stop_token_ids=sequence.stop_token_ids,
        output_token_ids=output_token_ids,
        status=status,
    )
