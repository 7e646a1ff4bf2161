"""The events of one request, in order: each token index of each choice once, then exactly one terminal event.

Pure bookkeeping between the tasks that add events, from pub/sub or the journal, and one reader. Every token is kept (4
bytes each, at most max_tokens per choice): a slow reader costs nothing more, and a store that lost its memory can get
the beginning of the answer back. Log-probabilities stay encoded and take a hundred times as much. Once read, they
are kept only if other clients may read them; a reader that lags by MAX_UNREAD_SCORES of them gets the rest from the
journal after it has caught up.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from shared.messages import (
    EncodedLogprobs,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    JournalExtras,
    JournalFrame,
    PromptLogprobs,
    StoredChoice,
    StreamEvent,
    TerminalEvent,
    TokenEvent,
    Usage,
    scores_by_index,
)
from shared.new_requests import RetentionTerms

MAX_UNREAD_SCORES = 2_048  # tokens per choice, each with up to 21 log-probabilities: about 1 MB
# Tokens per event: reading, parsing, and writing take 15 us per token, or 40 us with 20 log-probabilities.
MAX_READ_TOKENS = 64
MAX_READ_SCORES = 16


class StreamState(Enum):
    PENDING = "pending"  # ACCEPT has not replied
    QUEUED = "queued"  # stored; no worker known
    LIVE = "live"  # events arrive in order
    NEEDS_JOURNAL = "needs_journal"  # a hole is known
    PAUSED = "paused"  # the reader is too slow, or follows another one: nothing is taken until it has read everything
    DIVERGED = "diverged"  # regenerated tokens differ from sent tokens: only the journal decides
    SUSPENDED = "suspended"  # accepted again: published events may be of the previous epoch until its marker arrives
    ENDED = "ended"


_S = StreamState
TRANSITIONS: Mapping[StreamState, frozenset[StreamState]] = {
    # An event proves that the store has the request, so a pending stream may skip QUEUED.
    _S.PENDING: frozenset({_S.QUEUED, _S.LIVE, _S.ENDED}),
    _S.QUEUED: frozenset({_S.LIVE, _S.NEEDS_JOURNAL, _S.SUSPENDED, _S.ENDED}),
    _S.LIVE: frozenset({_S.NEEDS_JOURNAL, _S.PAUSED, _S.DIVERGED, _S.SUSPENDED, _S.ENDED}),
    _S.NEEDS_JOURNAL: frozenset({_S.LIVE, _S.PAUSED, _S.DIVERGED, _S.SUSPENDED, _S.ENDED}),
    _S.PAUSED: frozenset({_S.LIVE, _S.NEEDS_JOURNAL, _S.DIVERGED, _S.SUSPENDED, _S.ENDED}),
    _S.DIVERGED: frozenset({_S.LIVE, _S.SUSPENDED, _S.ENDED}),
    _S.SUSPENDED: frozenset({_S.NEEDS_JOURNAL, _S.ENDED}),
    _S.ENDED: frozenset(),
}

_JOINING_STATES = frozenset({_S.QUEUED, _S.LIVE, _S.NEEDS_JOURNAL, _S.PAUSED})


class IllegalTransition(Exception):
    """A stream cannot go from its state to the requested one."""


class _ChoiceTokens:
    """The tokens of one choice, and how many of them the reader has."""

    __slots__ = (
        "_keeps_logprobs", "_next", "_num_read", "finish_reason", "index", "is_queued", "logprobs", "tokens",
    )  # fmt: skip

    def __init__(self, index: int, *, keeps_logprobs: bool) -> None:
        self.index = index
        self._keeps_logprobs = keeps_logprobs  # after they were read
        self.tokens = array("i")
        self.logprobs: dict[int, EncodedLogprobs] = {}  # by index, if requested
        self.finish_reason: FinishReason | None = None
        self.is_queued = False  # the reader has something to read
        self._num_read = 0
        self._next: TokenEvent | None = None  # everything unread, if it came in one event

    @property
    def num_unread(self) -> int:
        return len(self.tokens) - self._num_read

    def passes(self, event: TokenEvent) -> bool:
        """Take an event that continues directly after the read tokens, as nearly all do; return False if it does not.

        Such an event is passed to the reader unchanged.
        """
        token_ids = event.token_ids
        if self.is_queued or event.index != len(self.tokens) or not 0 < len(token_ids) <= MAX_READ_TOKENS:
            return False
        if event.finish_reason is not None:
            return False
        if event.logprobs and (self._keeps_logprobs or not len(event.logprobs) == len(token_ids) <= MAX_READ_SCORES):
            return False
        self.tokens.extend(token_ids)
        self._next, self.is_queued = event, True
        return True

    def extend(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> bool:
        """Append tokens; return whether there is anything new to read."""
        if self._next is not None:
            if self._next.logprobs:
                self.keep_logprobs(dict(enumerate(self._next.logprobs, self._next.index)))
            self._next = None
        self.tokens.extend(token_ids)
        if finish_reason is not None and self.finish_reason is None:
            self.finish_reason = finish_reason
            return True
        return bool(token_ids)

    def keep_logprobs(self, logprobs: Mapping[int, EncodedLogprobs]) -> None:
        """Keep log-probabilities by index until they are read, as copies that do not keep their message alive."""
        self.logprobs.update({index: encoded.copy() for index, encoded in logprobs.items()})

    def read(self, request_id: str) -> TokenEvent:
        """Return the unread tokens, at most one event's; `is_queued` stays set if more remain."""
        if (event := self._next) is not None:
            self._num_read = len(self.tokens)
            self._next, self.is_queued = None, False
            return event
        start = self._num_read
        end = self._num_read = min(len(self.tokens), start + (MAX_READ_SCORES if self.logprobs else MAX_READ_TOKENS))
        self.is_queued = end < len(self.tokens)
        token_ids, finish_reason = self.tokens[start:end].tolist(), None if self.is_queued else self.finish_reason
        if not self.logprobs:  # nearly always
            return TokenEvent(request_id, start, token_ids, self.index, finish_reason)
        logprobs = self._logprobs_of(start, end)
        if not self._keeps_logprobs:
            for index in range(start, end):
                self.logprobs.pop(index, None)
        return TokenEvent(request_id, start, token_ids, self.index, finish_reason, logprobs)

    def frame(self) -> JournalFrame:
        """Return everything so far as a journal frame."""
        logprobs = self._logprobs_of(0, len(self.tokens))
        extras = None if logprobs is None else JournalExtras(logprobs)
        return JournalFrame(0, self.tokens.tolist(), extras, self.index, self.finish_reason)

    def _logprobs_of(self, start: int, end: int) -> list[EncodedLogprobs] | None:
        """Return them for tokens `start` to `end`; None if any token has none, as from an older worker."""
        if not self.logprobs:
            return None
        known = [self.logprobs[index] for index in range(start, end) if index in self.logprobs]
        return known if known and len(known) == end - start else None


class Inbox:
    """Orders the events of one request. No text and no Redis.

    Listening and recovery add events, and one reader reads them. Each change of state is checked against TRANSITIONS.
    """

    __slots__ = (
        "_choices", "_leader", "_num_prompt_scores", "_terminal", "_unread", "epoch", "had_ended", "last_event_at",
        "num_doubts", "num_repeated_tokens", "num_replays", "on_caught_up", "on_ready", "prompt_logprobs", "request",
        "reread_at", "state", "terms",
    )  # fmt: skip

    def __init__(self, request: GenerationRequest, terms: RetentionTerms | None = None) -> None:
        self.request = request
        self.terms = terms  # if other clients can attach to the request
        self.state = StreamState.PENDING
        self.had_ended = False  # the request had ended in the store before this reader attached
        self.on_ready: Callable[[], None] = _ignore  # something can be read; must not raise
        self.on_caught_up: Callable[[Inbox], None] = Inbox.lead  # a paused reader has read everything; must not raise
        self.last_event_at = 0.0  # monotonic seconds; set by the tasks that add events
        self.epoch = 0  # of its journal, which starts again when the request is accepted again
        self.num_repeated_tokens = 0
        self.reread_at = 0.0  # when a stream that needs its journal is due; monotonic seconds
        self.num_doubts = 0  # how often need_journal() was called
        self.num_replays = 0  # readings of the journal that are being decoded
        self.prompt_logprobs: dict[int, EncodedLogprobs] = {}  # by prompt index; complete before the first token
        self._choices = [
            _ChoiceTokens(index, keeps_logprobs=terms is not None) for index in range(request.sampling.n)
        ]  # fmt: skip
        self._unread: deque[_ChoiceTokens] = deque()
        self._terminal: TerminalEvent | None = None  # until it is read
        self._leader: Inbox | None = None  # has all tokens of this reader
        scores = request.sampling.prompt_logprobs is not None
        self._num_prompt_scores = len(request.prompt_token_ids) - 1 if scores else 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def frames(self) -> list[JournalFrame]:
        """Everything so far, as journal frames."""
        frames = [choice.frame() for choice in self._choices if choice.tokens or choice.finish_reason]
        if scores := _scores_from_the_start(self.prompt_logprobs):
            frames.insert(0, JournalFrame(0, [], JournalExtras(prompt_logprobs=scores)))
        return frames

    @property
    def choices(self) -> Sequence[_ChoiceTokens]:
        return self._choices

    @property
    def num_tokens(self) -> int:
        return sum(self.num_known)

    @property
    def num_known(self) -> list[int]:
        """Number of tokens of each choice."""
        return [len(choice.tokens) for choice in self._choices]

    @property
    def has_ended(self) -> bool:
        return self.state is StreamState.ENDED

    def accept(self) -> None:
        """Record that the store has the request."""
        if self.state is StreamState.PENDING:
            self._become(StreamState.QUEUED)

    def add_event(self, event: StreamEvent) -> None:
        """Add an event from pub/sub: in order, repeated, or after a gap.

        The caller calls the listener, once for all events that came together.
        """
        if self.state is not StreamState.LIVE and not self._takes_events():
            return
        if not isinstance(event, TokenEvent):
            if self._is_complete(event):
                self._become(StreamState.ENDED)
                self._terminal = event
            else:
                self._miss_events()
            return
        if event.prompt_logprobs:
            self.prompt_logprobs |= scores_by_index(event.prompt_logprobs)
        if self._num_prompt_scores and event.token_ids and len(self.prompt_logprobs) < self._num_prompt_scores:
            self._miss_events()
            return
        if event.choice >= len(self._choices):
            return  # no such choice
        choice = self._choices[event.choice]
        if choice.passes(event):
            self._unread.append(choice)
        else:
            logprobs = dict(enumerate(event.logprobs, event.index)) if event.logprobs else None
            self._take(choice, event.index, event.token_ids, event.finish_reason, logprobs)

    def add_journal(self, choices: Sequence[StoredChoice], terminal: TerminalEvent | None) -> bool:
        """Add the journal from its beginning, and the stored end, which must have been read before the journal.

        Returns:
            False if its tokens differ from those that the reader has; then nothing is taken.
        """
        if self.state is StreamState.ENDED:
            return True
        if self._differs(choices, terminal):
            if self.state is not StreamState.SUSPENDED:
                self._become(StreamState.DIVERGED)
            return False
        for choice in choices:
            self.prompt_logprobs |= choice.prompt_logprobs
        while not self._take_journal(choices):
            self.on_ready()
            if self.state is not StreamState.NEEDS_JOURNAL:
                return True  # the reader has not caught up, or the epoch has not begun
        if terminal is not None:
            self._become(StreamState.ENDED)
            self._terminal = terminal
        self.on_ready()
        return True

    def follows(self) -> bool:
        """Take tokens from another reader of the answer from now on, not from events. Returns whether it does.

        The other reader takes each event once, and this one takes what is new in its own time.
        """
        if self.state is StreamState.LIVE and not self.num_replays:
            self._become(StreamState.PAUSED)
        return self.state is StreamState.PAUSED

    def lead(self) -> None:
        """Take events again, after the journal: no other reader has what is missing."""
        self._leader = None  # or each former first reader would keep the one before it
        if self.state is StreamState.PAUSED:
            self._become(StreamState.NEEDS_JOURNAL)

    @property
    def is_current(self) -> bool:
        """Whether no event is known to be missing."""
        return self.state is StreamState.LIVE and not self.num_replays

    def join(self, leader: "Inbox") -> bool:
        """Take what another reader of the answer, which is current, has beyond this one.

        What this one has is then as certain as what the other has, whatever was in doubt.

        Returns:
            False if their tokens differ, or this one is in a state in which only the journal decides.
        """
        if self.state not in _JOINING_STATES:
            return False
        pairs = list(zip(self._choices, leader.choices, strict=True))
        if leader is not self._leader and any(own.tokens != its.tokens[: len(own.tokens)] for own, its in pairs):
            return False
        self._leader = leader
        if self.state is StreamState.NEEDS_JOURNAL:
            self._become(StreamState.LIVE)
        self.last_event_at = leader.last_event_at
        if len(self.prompt_logprobs) < len(leader.prompt_logprobs):
            self.prompt_logprobs |= leader.prompt_logprobs
        for own, its in pairs:
            start = len(own.tokens)
            if start < len(its.tokens) or its.finish_reason is not own.finish_reason:
                self._take(own, start, its.tokens[start:], its.finish_reason, its.logprobs)
        return True

    def join_at_end(self, leader: "Inbox") -> None:
        """Join it for the last time: the end, which comes as an event, ends both."""
        if self.state is StreamState.PAUSED and leader.is_current and self.join(leader):
            self._become(StreamState.LIVE)

    def need_journal(self) -> None:
        """Record that an event may be missing. States that already lead to a reading of the journal stay."""
        self.num_doubts += 1
        self.reread_at = 0.0
        if self.state is StreamState.LIVE or self.state is StreamState.QUEUED:
            self._become(StreamState.NEEDS_JOURNAL)
        elif self.state is StreamState.PENDING:
            self.last_event_at = -math.inf  # it is read as soon as ACCEPT has replied

    def await_journal(self, at: float) -> None:
        """Record that the store lost tokens that the reader has: a later reading shows whether it generated others."""
        self.need_journal()
        self.reread_at = at

    def begin_replay(self) -> None:
        """Record that the journal was read and is being decoded: a hole found from now on needs it again."""
        self.num_replays += 1
        if self.state is StreamState.NEEDS_JOURNAL:
            self._become(StreamState.LIVE)

    def end_replay(self) -> None:
        """Record that what was read has been added, or is obsolete."""
        self.num_replays -= 1

    def suspend(self, epoch: int) -> None:
        """Take tokens only from the new journal, which begins with the current tokens, until its marker arrives."""
        if self.state is not StreamState.SUSPENDED:
            self._become(StreamState.SUSPENDED)
        self.epoch = epoch

    def resume(self) -> None:
        """Take events again: everything published before the epoch has arrived."""
        self._become(StreamState.NEEDS_JOURNAL)

    def end(self, terminal: TerminalEvent) -> None:
        """End the stream, unless its reader has the end already."""
        if self.state is not StreamState.ENDED:
            self._become(StreamState.ENDED)
        elif self._terminal is None:
            return
        self._terminal = terminal
        self.on_ready()

    def read(self) -> StreamEvent | None:
        """Return the unread tokens of a choice in one event, or the end (once), or None if there is nothing now."""
        if not self._unread and self.state is StreamState.PAUSED:
            self.on_caught_up(self)
        if self._unread:
            choice = self._unread.popleft()
            event = choice.read(self.request.request_id)
            if choice.is_queued:
                self._unread.append(choice)
            elif self.state is StreamState.PAUSED and not self._unread:
                self.on_caught_up(self)
            return event
        terminal, self._terminal = self._terminal, None
        return terminal

    def _become(self, state: StreamState) -> None:
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.request_id}: {self.state.value} to {state.value}")
        self.state = state

    def _miss_events(self) -> None:
        self._become(StreamState.NEEDS_JOURNAL)
        self.reread_at = 0.0

    def _takes_events(self) -> bool:
        """Return whether events are taken in this state; the first one shows that a worker has the request."""
        if self.state is StreamState.PENDING or self.state is StreamState.QUEUED:
            self._become(StreamState.LIVE)
        return self.state is StreamState.LIVE or self.state is StreamState.NEEDS_JOURNAL

    def _take_journal(self, choices: Sequence[StoredChoice]) -> bool:
        """Take what is new in a journal; return False if the reader must read before the rest can be taken."""
        if self.state in (StreamState.NEEDS_JOURNAL, StreamState.PAUSED, StreamState.DIVERGED):
            self._become(StreamState.LIVE)
        taken = [
            self._take(choice, 0, stored.token_ids, stored.finish_reason, stored.logprobs)
            for choice, stored in zip(self._choices, choices, strict=False)
        ]
        return all(taken)

    def _take(
        self,
        choice: _ChoiceTokens,
        start: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        logprobs: Mapping[int, EncodedLogprobs] | None,
    ) -> bool:
        """Take the tokens of a choice that are new; return False if more log-probabilities wait than may."""
        if start > len(choice.tokens):
            self._miss_events()
            return True
        if start < len(choice.tokens):
            num_known = min(len(choice.tokens) - start, len(token_ids))
            if choice.tokens[start : start + num_known] != array("i", token_ids[:num_known]):
                self._become(StreamState.DIVERGED)
                return True
            self.num_repeated_tokens += num_known
            token_ids = token_ids[num_known:]
        has_room = True
        if logprobs:
            start, room = len(choice.tokens), MAX_UNREAD_SCORES - choice.num_unread
            if len(token_ids) > room:
                token_ids, finish_reason, has_room = token_ids[:room], None, False
            new = range(start, start + len(token_ids))
            choice.keep_logprobs({index: logprobs[index] for index in new if index in logprobs})
        if choice.extend(token_ids, finish_reason):
            if not choice.is_queued:
                choice.is_queued = True
                self._unread.append(choice)
            if self.state is StreamState.PENDING or self.state is StreamState.QUEUED:
                self._become(StreamState.LIVE)
        if not has_room and self.state is not StreamState.SUSPENDED:
            self._become(StreamState.PAUSED)
        return has_room

    def _differs(self, choices: Sequence[StoredChoice], terminal: TerminalEvent | None) -> bool:
        """Return whether a journal has other tokens than the reader; one that is only shorter may still grow."""
        is_whole = isinstance(terminal, FinishEvent) and terminal.reason is not FinishReason.CANCELLED
        for choice, stored in zip(self._choices, choices, strict=False):
            num_both = min(len(choice.tokens), len(stored.token_ids))
            if choice.tokens[:num_both] != array("i", stored.token_ids[:num_both]):
                return True
            if is_whole and num_both < len(choice.tokens):
                return True
        return False

    def _is_complete(self, terminal: TerminalEvent) -> bool:
        """Return whether all tokens before the end have come; an error has no count, so the journal must be read.

        A journal that is being decoded may have other tokens than the reader.
        """
        if self.state is StreamState.NEEDS_JOURNAL or self.num_replays or isinstance(terminal, ErrorEvent):
            return False
        has_all_scores = len(self.prompt_logprobs) >= self._num_prompt_scores
        return has_all_scores and terminal.usage.completion_tokens == self.num_tokens


def _ignore() -> None:
    pass


def _scores_from_the_start(by_index: Mapping[int, EncodedLogprobs]) -> PromptLogprobs | None:
    """Return the log-probabilities of the prompt up to the first that is missing."""
    tokens: list[EncodedLogprobs] = []
    while (index := len(tokens) + 1) in by_index:
        tokens.append(by_index[index])
    return PromptLogprobs(1, tokens) if tokens else None


def cancelled_event(stream: Inbox, reason: FinishReason = FinishReason.CANCELLED, ended_at: int = 0) -> FinishEvent:
    """Return the end that the reader sees when this gateway withdraws the request; `ended_at` is in Unix seconds."""
    usage = Usage(prompt_tokens=len(stream.request.prompt_token_ids), completion_tokens=stream.num_tokens)
    return FinishEvent(stream.request_id, reason, usage, ended_at)
