"""A request inside the engine: the sequences of its choices or beams, which share what they have in common.

    sequences   those that have not ended. The first one computes the prompt for all.
    active      those that hold blocks, on the device or swapped to the host: none (waiting), the first (the prompt is
                being computed), or all (forked)

A group is admitted, preempted and ended as a whole. Its blocks are shared by reference from the fork on, and copied
when they are written to. Most groups are of one sequence, which is never forked. Knows nothing of events or devices. A
takeover makes one of a claimed request; a block's walk admits, preempts and frees it.
"""

from collections.abc import Iterable
from typing import Protocol

from engine_worker.scheduling.beam_search import BeamSearch, Hypothesis
from engine_worker.scheduling.sequence import BeamCandidate, Sequence, SequenceStatus


class ForkableTables(Protocol):
    """The part of KVSlots that a beam search needs; the whole of it knows batches, which know groups."""

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None: ...

    def free(self, sequence: Sequence) -> None: ...


class SequenceGroup:
    """The sequences of one request. It has many members because the scheduler asks all of a request here."""

    def __init__(self, sequences: list[Sequence], num_ended_tokens: int = 0, *, is_background: bool = False) -> None:
        """`sequences`: at least one, all of one request. `num_ended_tokens`: those of choices that ended elsewhere."""
        first = sequences[0]
        self.request_id = first.request_id
        self.is_background = is_background  # of the class that waits behind interactive requests
        self.sampling = first.sampling
        self.num_prompt_tokens = first.num_prompt_tokens
        self.sequences = sequences
        self.active: list[Sequence] = []
        # Sequences that it has or may get: places in a batch that are kept for it.
        self.num_seats = first.sampling.beam_width if first.sampling.use_beam_search else len(sequences)
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of the prompt, when it was first admitted
        self.max_num_tokens = 0  # the longest that one of its sequences gets; set when it is queued
        self.beam_search: BeamSearch | None = None
        self._num_ended_tokens = num_ended_tokens

    @property
    def is_forked(self) -> bool:
        return len(self.active) == len(self.sequences)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of it was ever computed here."""
        return self.num_preemptions == 0 and not self.active

    @property
    def is_swapped(self) -> bool:
        return bool(self.active) and self.active[0].status is SequenceStatus.SWAPPED

    @property
    def is_pinned(self) -> bool:
        """Preempted more than once and no token further since it came back."""
        return self.sequences[0].is_pinned

    @property
    def num_output_tokens(self) -> int:
        """The output tokens of all choices, those that have ended included."""
        return self._num_ended_tokens + sum(sequence.num_output_tokens for sequence in self.sequences)

    @property
    def has_inflight_tokens(self) -> bool:
        return any(sequence.num_inflight_tokens for sequence in self.sequences)

    @property
    def may_decode(self) -> bool:
        """Beams are compared with each other, so they wait until all of them lack one token."""
        if not self.sampling.use_beam_search:
            return True
        return self.is_forked and all(sequence.num_uncomputed_tokens == 1 for sequence in self.active)

    def num_fork_blocks(self, block_size: int, most_blocks_each: int) -> int:
        """Blocks that the sequences that are not active yet need of their own, or will with their next token."""
        shared_blocks = self.num_prompt_tokens // block_size
        waiting = self.sequences[max(1, len(self.active)) :]
        own = (-(-child.num_tokens // block_size) - shared_blocks for child in waiting)
        return sum(min(num_blocks, most_blocks_each) for num_blocks in own)

    def num_prefill_tokens(self, sequence: Sequence) -> int:
        """The tokens that it lacks; all but the last of a beam that was preempted, which does not sample on its own."""
        return sequence.num_uncomputed_tokens - (self.sampling.use_beam_search and sequence.num_output_tokens > 0)

    def preempted(self, *, is_swap: bool) -> None:
        """Its blocks are free; swapped sequences stay active, the others are forked from the first again."""
        self.num_preemptions += 1
        for sequence in self.active:
            sequence.status = SequenceStatus.SWAPPED if is_swap else SequenceStatus.WAITING
        if not is_swap:
            self.active = []

    def end_sequence(self, sequence: Sequence) -> None:
        """One choice has ended; its blocks are free already."""
        self._num_ended_tokens += sequence.num_output_tokens
        sequence.status = SequenceStatus.FINISHED
        self.num_seats -= 1
        self.sequences = [other for other in self.sequences if other is not sequence]
        self.active = [other for other in self.active if other is not sequence]

    def end(self) -> None:
        """All that is left, whatever became of it; its blocks are free already."""
        for sequence in self.sequences:
            sequence.status = SequenceStatus.FINISHED
        self.sequences, self.active = [], []

    def end_search(self, beam: Sequence, answers: Iterable[Hypothesis]) -> list[Sequence]:
        """The answers of a search that is over, best first, as sequences like `beam`, which was one of it."""
        ended = []
        for choice, answer in enumerate(answers):
            sequence = _like(beam, answer.token_ids, SequenceStatus.FINISHED)
            sequence.choice = choice
            self._num_ended_tokens += sequence.num_output_tokens
            ended.append(sequence)
        return ended

    def move_beams(self, moves: Iterable[BeamCandidate], kv_cache: ForkableTables) -> None:
        """Continue each move's beam by its token, in the order of the moves; beams without a move are dropped.

        The first move of a beam takes the beam itself, each other one a fork that shares all its blocks.
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
        for beam, move in moved:  # after the forks, which copy the tokens before
            beam.output_token_ids.append(move.token_id)
            beam.beam_score = move.score
        self.sequences = [beam for beam, _ in moved]
        self.active = list(self.sequences)


def _fork(parent: Sequence, kv_cache: ForkableTables) -> Sequence:
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
