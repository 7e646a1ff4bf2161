"""Builders and fakes for engine tests: a real scheduler, real block tables, and a model that is a hash function.

FakeModelRunner has its own KV cache, block by block, and samples a hash of what it reads *through the block table*. So
an output equals expected_output() only if every token was computed in a slot that no other sequence has written.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

from msgspec import structs
from msgspec.structs import asdict

from engine_worker.engine import BatchExecutor, Engine
from engine_worker.kv.block_pool import PADDING_BLOCK_ID
from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.kv_events import KVEventKind, KVEventLog
from engine_worker.kv.preemption import HostTierConfig
from engine_worker.kv.sequence import BeamCandidate, Sequence
from engine_worker.kv.sequence_kv import Table
from engine_worker.kv.transfers import Moves, TransferTime
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence, StepResult
from engine_worker.scheduling.beam_search import BeamSearch
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from engine_worker.scheduling.speculation.draft_gain import DraftGain
from engine_worker.scheduling.speculation.drafting import Drafting, DraftLimits, Proposer
from shared.choice_seeds import choice_seed
from shared.messages import (
    EncodedLogprobs,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    SamplingParams,
    StreamEvent,
    TokenEvent,
    TokenLogprobs,
    encoded_logprobs,
    encoded_vector,
)
from tests.request_ids import next_request_id

VOCAB_SIZE = 1_000
EOS_TOKEN_ID = 2
SWAP_SECONDS = 1e-4  # per block, reported by the fake runner


def make_sampling(**changes: Any) -> SamplingParams:
    """Return greedy parameters with 8 tokens, and `changes`."""
    return SamplingParams(**{"max_tokens": 8, "seed": 0, "temperature": 0.0, **changes})


def make_prompt(num_tokens: int, first: int = 10) -> list[int]:
    return [3 + (first + 7 * position) % (VOCAB_SIZE - 3) for position in range(num_tokens)]


def make_request(prompt: int | list[int] = 5, request_id: str | None = None, **sampling: Any) -> GenerationRequest:
    """Return a request. `prompt` is token ids, or a number of tokens, which then depend on the request id."""
    request_id = request_id or next_request_id()
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=make_prompt(prompt, first=crc32(request_id.encode())) if isinstance(prompt, int) else prompt,
        sampling=make_sampling(**sampling),
    )


def make_sequence(
    prompt: int | list[int] = 5,
    request_id: str | None = None,
    *,
    output_token_ids: Iterable[int] = (),
    eos_token_ids: Iterable[int] = (EOS_TOKEN_ID,),
    **sampling: Any,
) -> Sequence:
    request = make_request(prompt, request_id, **sampling)
    eos = frozenset[int]() if request.sampling.ignore_eos else frozenset(eos_token_ids)
    return Sequence(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        stop_token_ids=eos.union(request.sampling.stop_token_ids),
        output_token_ids=list(output_token_ids),
    )


def make_scheduler(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    host_tier: HostTierConfig | None = None,
    events: KVEventLog | None = None,
    windows: SequenceOf[int] = (0,),
    num_state_blocks: int = 0,
    drafting: Callable[[KVAllocator, SchedulerConfig], Drafting] | None = None,
    **config: Any,
) -> Scheduler:
    """Return a scheduler with 64 usable blocks of 4 tokens by default. `windows`: one per group of layers."""
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    limits = SchedulerConfig(**{**defaults, **config})
    kv_cache = KVCacheManager(
        num_blocks,
        block_size,
        windows=windows,
        max_new_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        host_tier=host_tier,
        num_state_blocks=num_state_blocks,
        events=events,
    )
    return Scheduler(limits, kv_cache, drafting(kv_cache, limits) if drafting is not None else None)


def drafting_by(
    proposer: Proposer,
    max_drafts: int = 3,
    gain: DraftGain | None = None,
    max_samples: int = 1000,
    *,
    may_run_ahead: bool = False,
) -> Callable[[KVAllocator, SchedulerConfig], Drafting]:
    """Return what make_scheduler() needs to draft by `proposer`; without `gain` in every step."""
    return partial(
        _drafting, proposer, max_drafts, gain or DraftGain(0.0, runs_ahead=False), max_samples, may_run_ahead
    )


def _drafting(
    proposer: Proposer,
    max_drafts: int,
    gain: DraftGain,
    max_samples: int,
    may_run_ahead: bool,
    kv_cache: KVAllocator,
    limits: SchedulerConfig,
) -> Drafting:
    of_step = DraftLimits(
        max_drafts=max_drafts,
        max_samples=max_samples,
        max_tokens=limits.max_num_batched_tokens,
        may_run_ahead=may_run_ahead,
    )
    return Drafting(proposer, kv_cache, of_step, gain)


def preempted(scheduler: Scheduler, batch: ScheduledBatch, since: int = 0) -> list[str]:
    """Return the ids of requests that were preempted when `batch` was scheduled, by events after number `since`."""
    kinds = (KVEventKind.SWAP_OUT, KVEventKind.RECOMPUTE)
    events = scheduler.kv_events(since)["events"]
    return [
        event["request_id"]
        for event in events
        if event["step"] == batch.transfers.batch_number and event["kind"] in kinds
    ]


class FakeModelRunner:
    """A BatchExecutor without a model. `failures`: request id -> message, given when that sequence is next in a batch.

    Blocks from the host arrive as late as they may on a device: after the step that fetches them.
    `before_step` is called with every batch, in the thread that executes it: tests look, wait or raise there.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        block_size: int = 4,
        vocab_size: int = VOCAB_SIZE,
        windows: SequenceOf[int] = (0,),
        num_state_blocks: int = 0,
        before_step: Callable[[ScheduledBatch], None] | None = None,
        draft_error_ratio: float | None = None,
    ) -> None:
        """Create a runner. `windows`: per group of layers, the last tokens that it sees; 0: all.

        With `draft_error_ratio` it drafts at the end of a step, and this share of the drafts are random tokens.

        The model sees what the group with the widest window sees. With state blocks it has recurrent layers, whose
        state after some tokens is those tokens.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.failures: dict[str, str] = {}
        self.num_computed_tokens = 0
        self._windows = windows
        self._before_step = before_step
        self._left: dict[Sequence, LeftByStep] = {}  # by the last batch, as on a device
        self._draft_error_ratio, self._random = draft_error_ratio, Random(0)
        self._cache: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._host: dict[int, list[int | None]] = {}
        self._states: list[list[int]] = [[] for _ in range(num_state_blocks)]
        self._host_states: dict[int, list[int]] = {}

    def submit(self, batch: ScheduledBatch) -> "FakeStep":
        """Compute at once, because later submissions cannot change what a device reads."""
        if self._before_step is not None:
            self._before_step(batch)
        arrivals = [
            (pool, self._moved(pool, host, moves))
            for pool, host, moves in (
                (self._cache, self._host, batch.transfers.kv),
                (self._states, self._host_states, batch.transfers.states),
            )
        ]
        for scheduled in batch.sequences:
            assert scheduled.end == scheduled.sequence.kv.num_computed_tokens
        computed = list(map(self._with_known_drafts, batch.sequences))
        for scheduled in computed:
            self._store(scheduled)
        failures = {
            scheduled.sequence.request_id: self.failures.pop(scheduled.sequence.request_id)
            for scheduled in batch.sequences
            if scheduled.sequence.request_id in self.failures
        }
        sampled = [self._sample(scheduled, failures) for scheduled in computed]
        number = batch.num_drafts_to_make if self._draft_error_ratio is not None else 0
        self._left = {
            scheduled.sequence: self._left_by(scheduled, tokens or [0] * scheduled.samples, number)
            for scheduled, tokens in zip(computed, sampled, strict=True)
        }
        made = {sequence: left.drafts for sequence, left in self._left.items() if left.drafts}
        for pool, fetched in arrivals:  # the latest allowed moment
            for block_id, content in fetched.items():
                pool[block_id] = list(content)
        phase_seconds = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}
        result = StepResult(sampled, failures, phase_seconds, logprobs=_logprobs(batch, sampled), drafts=made)
        result.prompt_logprobs.extend(_prompt_logprobs(batch))
        beams: dict[str, list[ScheduledSequence]] = {}
        for scheduled in batch.sequences:
            if scheduled.samples and scheduled.sequence.sampling.use_beam_search:
                beams.setdefault(scheduled.sequence.request_id, []).append(scheduled)
        result.transfer_times.append(
            TransferTime(
                batch.transfers.batch_number,
                len(batch.transfers.kv.swap_out) * SWAP_SECONDS,
                len(batch.transfers.kv.swap_in) * SWAP_SECONDS,
            )
        )
        result.beam_candidates.update({request_id: self._candidates(group) for request_id, group in beams.items()})
        return FakeStep(result, list(zip(batch.sequences, computed, strict=True)))

    def _with_known_drafts(self, scheduled: ScheduledSequence) -> ScheduledSequence:
        """Return what a device computes: it knows the drafts that it made, and how many of the last ones stand."""
        sequence = scheduled.sequence
        if scheduled.end - len(scheduled.drafts) <= sequence.num_known_tokens or not scheduled.num_new_tokens:
            return scheduled
        left = self._left[sequence]
        assert left.end <= scheduled.start
        drafts = scheduled.drafts
        if scheduled.has_unknown_drafts:
            drafts = tuple(left.drafts[: len(drafts)])
            assert len(drafts) == len(scheduled.drafts), "a draft that no step made"
        num_wrong = scheduled.start - left.end if scheduled.num_pending else 0
        return replace(scheduled, start=left.end, drafts=drafts, num_pending=scheduled.num_pending - num_wrong)

    def _left_by(self, scheduled: ScheduledSequence, tokens: list[int], num_drafts: int) -> "LeftByStep":
        """Return what a step leaves for the next one. A fork is not computed yet, so the head does not draft for it."""
        end = scheduled.end - len(scheduled.drafts) + max(0, len(tokens) - 1)
        drafts: list[int] = []
        if scheduled.samples and scheduled.num_new_tokens and num_drafts:
            seen = replace(scheduled, num_new_tokens=end - scheduled.start)
            window = 0 if 0 in self._windows else max(self._windows)
            prefix, index = [*self._prefix(seen), tokens[-1]], scheduled.output_index + len(tokens)
            for number in range(num_drafts):
                right = self._token_after([*prefix, *drafts][-window:], index + number, scheduled.sequence)
                is_wrong = self._random.random() < (self._draft_error_ratio or 0.0)
                drafts.append(self._random.randrange(self.vocab_size) if is_wrong else right)
        return LeftByStep(end, tokens[-1] if tokens else 0, drafts)

    def _moved(self, pool: list[Any], host: dict[int, Any], moves: Moves) -> dict[int, Any]:
        """Make the moves of one pool, and return what comes from the host, by device block."""
        for copy in moves.swap_out:
            host[copy.target_block_id] = list(pool[copy.source_block_id])
        fetched = {copy.target_block_id: host[copy.source_block_id] for copy in moves.swap_in}
        targets = [copy.target_block_id for copy in moves.copies]
        assert not {copy.source_block_id for copy in moves.copies} & set(targets) and 0 not in targets
        assert len(targets) == len(set(targets)), "copies of one step run in any order"
        assert not fetched.keys() & set(targets), "a fetched block may change during the step"
        for copy in moves.copies:
            pool[copy.target_block_id] = list(pool[copy.source_block_id])
        return fetched

    def _store(self, scheduled: ScheduledSequence) -> None:
        sequence = scheduled.sequence
        if scheduled.num_new_tokens == 0:
            assert scheduled.samples, "a fork that computes nothing"
            return
        end = scheduled.end - len(scheduled.drafts)
        token_ids = [*sequence.token_ids(scheduled.start, end), *scheduled.drafts]
        if end > sequence.num_known_tokens:
            assert end - scheduled.start == 1, "a token in flight in the middle of a chunk"
            token_ids = [self._left[sequence].token_id, *scheduled.drafts]
        for position, token_id in enumerate(token_ids, scheduled.start):
            for table in sequence.kv.tables:
                block_id = table.blocks[position // self.block_size]
                assert block_id != PADDING_BLOCK_ID
                self._cache[block_id][position % self.block_size] = token_id
        if self._states:
            self._update_state(scheduled, token_ids)
        self.num_computed_tokens += scheduled.num_new_tokens

    def _update_state(self, scheduled: ScheduledSequence, token_ids: list[int]) -> None:
        block_id = scheduled.sequence.kv.state_block
        assert block_id != PADDING_BLOCK_ID, "a running sequence without a state"
        before = self._stored(scheduled, scheduled.start)
        assert self._states[block_id] == before[: scheduled.start - scheduled.num_pending], "a state of other tokens"
        self._states[block_id] = before if scheduled.drafts else [*before, *token_ids]

    def _stored(self, scheduled: ScheduledSequence, end: int) -> list[int]:
        """Return the first `end` tokens, as the blocks of the first group have them."""
        blocks = scheduled.sequence.kv.tables[0].blocks
        slots = [slot for block_id in blocks for slot in self._cache[block_id]]
        return [-1 if token_id is None else token_id for token_id in slots[:end]]

    def _sample(self, scheduled: ScheduledSequence, failures: dict[str, str]) -> list[int] | None:
        """Return the drafts that equal their samples, then one more token."""
        sequence = scheduled.sequence
        if not scheduled.samples or sequence.request_id in failures:
            return None
        tokens: list[int] = []
        for number in range(len(scheduled.drafts) + 1):
            seen = replace(scheduled, num_new_tokens=scheduled.num_new_tokens - len(scheduled.drafts) + number)
            tokens.append(self._next_token(seen, scheduled.output_index + number))
            if scheduled.drafts[number : number + 1] != (tokens[-1],):
                break
        return tokens

    def _next_token(self, seen: ScheduledSequence, index: int) -> int:
        return self._token_after(self._prefix(seen), index, seen.sequence)

    def _token_after(self, prefix: list[int], index: int, sequence: Sequence) -> int:
        return next_token(prefix, index, sequence.sampling, sequence.stop_token_ids, self.vocab_size)

    def _candidates(self, beams: list[ScheduledSequence]) -> list[BeamCandidate]:
        """Return the requested number of candidates, although each beam has only a few likely ones."""
        return best_candidates(
            [(self._prefix(beam), beam.sequence.beam_score) for beam in beams],
            beams[0].sequence.num_beam_candidates,
            self.vocab_size,
        )

    def _prefix(self, scheduled: ScheduledSequence) -> list[int]:
        tables = scheduled.sequence.kv.tables
        seen = [self._seen(scheduled, *group) for group in zip(tables, self._windows, strict=True)]
        widest = max(seen, key=len)
        assert all(widest[len(widest) - len(one) :] == one for one in seen), "groups hold different tokens"
        return widest

    def _seen(self, scheduled: ScheduledSequence, table: Table, window: int) -> list[int]:
        """Return what a group stores of the tokens that the last one sees."""
        end = scheduled.end
        start = min(scheduled.start, end - 1)  # a fork without tokens samples after its parent's last
        first = max(0, start - window + 1) if window else 0  # first token that the first new token sees
        slots = [slot for block_id in table.blocks for slot in self._cache[block_id]]
        assert PADDING_BLOCK_ID not in table.blocks[first // self.block_size :], "a visible block was freed"
        seen = [-1 if token_id is None else token_id for token_id in slots[first:end]]
        return seen[-window:]


def _logprobs(batch: ScheduledBatch, sampled: SequenceOf[list[int] | None]) -> list[list[EncodedLogprobs] | None]:
    """Return log-probabilities and vectors like the real executor: for requests that ask, and an empty list without."""
    sequences = [scheduled.sequence for scheduled in batch.sequences]
    if not any(sequence.sampling.logprobs is not None or sequence.pooling is not None for sequence in sequences):
        return []
    return [
        None if token_ids is None else _report(sequence, token_ids)
        for sequence, token_ids in zip(sequences, sampled, strict=True)
    ]


def _report(sequence: Sequence, token_ids: list[int]) -> list[EncodedLogprobs] | None:
    if sequence.pooling is not None:
        return [encoded_vector(fake_vector(token_ids[0], sequence.num_prompt_tokens))]
    return None if sequence.sampling.logprobs is None else list(map(fake_logprobs, token_ids))


def fake_vector(token_id: int, num_prompt_tokens: int) -> bytes:
    return struct.pack("<2f", token_id, num_prompt_tokens)


def _prompt_logprobs(batch: ScheduledBatch) -> Iterator[tuple[Sequence, PromptLogprobs]]:
    for scheduled in batch.sequences:
        sequence, tokens = scheduled.sequence, scheduled.scored_tokens
        if tokens:
            scores = [fake_logprobs(sequence.prompt_token_ids[index]) for index in tokens]
            yield sequence, PromptLogprobs(tokens.start, scores)


def fake_logprobs(token_id: int) -> EncodedLogprobs:
    """Return values that identify the token and are exact in any float type."""
    return encoded_logprobs(TokenLogprobs(-token_id / 1024, (token_id,), (-token_id / 1024,)))


@dataclass(frozen=True)
class LeftByStep:
    """What a step leaves on the device for the next one."""

    end: int  # the position of the next token to compute
    token_id: int  # of that token
    drafts: list[int]


@dataclass
class FakeStep:
    result: StepResult | None
    computed: list[tuple[ScheduledSequence, ScheduledSequence]]  # as scheduled, and as computed

    def collect(self) -> StepResult:
        assert self.result is not None, "a step is collected once"
        for scheduled, computed in self.computed:
            scheduled.drafts = computed.drafts
        result, self.result = self.result, None
        return result


def next_token(
    prefix: SequenceOf[int], index: int, sampling: SamplingParams, stop_token_ids: frozenset[int], vocab_size: int
) -> int:
    """Return the fake model's token: a hash of the prefix, and of (seed, index) unless greedy. Masks are applied."""
    key = [*prefix] if sampling.is_greedy else [*prefix, sampling.seed, index]
    token_id = crc32(array("q", key).tobytes()) % vocab_size
    while index < sampling.min_tokens and token_id in stop_token_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def best_candidates(
    beams: SequenceOf[tuple[SequenceOf[int], float]], num_candidates: int, vocab_size: int
) -> list[BeamCandidate]:
    """Return the fake model's candidates of beams (prefix, score): a hash of the prefix makes some tokens likely."""
    candidates = []
    for place, (prefix, score) in enumerate(beams):
        start = crc32(array("q", prefix).tobytes())
        token_ids = {EOS_TOKEN_ID, *((start * 31 + number * 7919) % vocab_size for number in range(num_candidates))}
        for token_id in token_ids:
            log_prob = -1 - crc32(array("q", [*prefix, token_id]).tobytes()) % 4096 / 1024
            candidates.append(BeamCandidate(place, token_id, score + log_prob))
    candidates.sort(key=lambda candidate: (-candidate.score, candidate.beam, candidate.token_id))
    return candidates[:num_candidates]


def expected_beams(
    request: GenerationRequest, *, max_num_tokens: int = 256, vocab_size: int = VOCAB_SIZE, window: int = 0
) -> Any:
    """Return beam search's answers with the fake model, without blocks or batches: (token ids, reason), best first."""
    sequence = make_sequence(request.prompt_token_ids, **asdict(request.sampling))
    longest = min(request.sampling.max_tokens, max_num_tokens - len(request.prompt_token_ids))
    search = BeamSearch(request.sampling, sequence.stop_token_ids, longest)
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    while beams:
        prefixes = [([*request.prompt_token_ids, *output][-window:], score) for output, score in beams]
        candidates = best_candidates(prefixes, sequence.num_beam_candidates, vocab_size)
        moves = search.advance([output for output, _ in beams], candidates)
        beams = [([*beams[move.beam][0], move.token_id], move.score) for move in moves]
    return [(answer.token_ids, answer.reason) for answer in search.best()]


def expected_output(
    request: GenerationRequest,
    *,
    eos_token_ids: Iterable[int] = (EOS_TOKEN_ID,),
    max_num_tokens: int = 256,
    vocab_size: int = VOCAB_SIZE,
    choice: int = 0,
    window: int = 0,
) -> list[int]:
    """Return the fake model's output of one choice, without blocks, chunks, or batches."""
    sampling = structs.replace(request.sampling, seed=choice_seed(request.sampling.seed, choice))
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_token_ids))
    output: list[int] = []
    while len(output) < sampling.max_tokens and len(request.prompt_token_ids) + len(output) < max_num_tokens:
        seen = (request.prompt_token_ids + output)[-window:]
        output.append(next_token(seen, len(output), sampling, stops, vocab_size))
        if output[-1] in stops and len(output) > sampling.min_tokens:
            break
    return output


def make_engine(
    executor: BatchExecutor | None = None,
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: Iterable[int] = (EOS_TOKEN_ID,),
    clock: Callable[[], float] = lambda: 0.0,
    async_scheduling: bool = False,
    **config: Any,
) -> Engine:
    """Return an engine. `config` is that of make_scheduler()."""
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=block_size, **config)
    return Engine(
        scheduler,
        executor or FakeModelRunner(num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size),
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
        clock=clock,
        async_scheduling=async_scheduling,
    )


@dataclass
class Transcript:
    """The view of each request's client: its tokens in order, and its end. Checks the indices of events."""

    tokens: dict[str, list[int]] = field(default_factory=dict)  # of choice 0
    others: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # (request id, choice): the other choices
    choice_ends: dict[tuple[str, int], FinishReason] = field(default_factory=dict)  # of requests of several
    ends: dict[str, FinishEvent | ErrorEvent] = field(default_factory=dict)

    def resume(self, request_id: str, token_ids: Iterable[int], choice: int = 0) -> None:
        self.choice(request_id, choice).extend(token_ids)

    def choice(self, request_id: str, choice: int) -> list[int]:
        """Return the mutable list of a choice's tokens."""
        if choice == 0:
            return self.tokens.setdefault(request_id, [])
        return self.others.setdefault((request_id, choice), [])

    def add(self, events: Iterable[StreamEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ends, f"{event} after the end"
            if isinstance(event, TokenEvent):
                tokens = self.choice(event.request_id, event.choice)
                assert event.index == len(tokens), f"{event} leaves a gap or repeats; {len(tokens)} tokens are out"
                assert (event.request_id, event.choice) not in self.choice_ends, f"{event} after its end"
                tokens += event.token_ids
                if event.finish_reason is not None:
                    self.choice_ends[event.request_id, event.choice] = event.finish_reason
            else:
                self.ends[event.request_id] = event


def run_to_end(engine: Engine, transcript: Transcript | None = None, max_steps: int = 10_000) -> Transcript:
    """Step until there is no work, and check the engine's counts after each step. Fails after `max_steps`."""
    transcript = transcript or Transcript()
    for _ in range(max_steps):
        if not engine.has_work:
            return transcript
        transcript.add(engine.step())
        engine.check_integrity()
    raise AssertionError(f"still at work after {max_steps} steps: {engine.stats()}")
