"""Measures what drafts gain, per size of the batch, and turns them off where it is too little.

A step with drafts costs more and gives more tokens. Both kinds of steps are timed; the slower kind is tried again for a
few steps from time to time, since contents change, and for two if drafts are much slower. Drafts make no step faster,
so the tokens that a sequence gets in a drafting step bound the gain: where they are too few in all batches, one step is
enough to try again.

A draft is a row of its step. Steps of different length give the time of a row, and so the chance of being right that a
draft needs to pay.
"""

from collections import defaultdict
from dataclasses import dataclass, field

_BOUND_STEPS = 2  # with drafts, before their tokens or their time tell that they cannot pay
_HOPELESS = 0.6  # a gain so low that few steps show it; a step without proposals has about 0.8 on a GPU
_TRIAL_STEPS = 8  # of the kind that is not in use
_STEPS_BETWEEN_TRIALS = 400  # 8 steps that take 1.5 times as long then cost 1 %
_WEIGHT = 0.1  # of a new measurement
_ROW_WEIGHT = 0.05  # of a new step in the time of a row: a difference of times varies more
_MIN_SPREAD = 0.1  # of the rows around their mean: steps of nearly equal length do not tell what a row costs
_RECORDED_ROWS = 32  # the first step of so many rows takes 30 ms more on a CPU (model/decode_programs.py)
_MAX_NEED = 0.95  # a chance that a sequence reaches, so that a cost that was measured too high is measured again


@dataclass(slots=True)
class _Ratio:
    """A ratio of two sums over steps: the mean of each step's own ratio would count steps with few tokens too much."""

    amount: float = 0.0  # weighted means of a step
    base: float = 0.0
    num_steps: int = 0

    @property
    def mean(self) -> float:
        return self.amount / self.base

    def add(self, amount: float, base: float) -> None:
        self.num_steps += 1
        weight = max(_WEIGHT, 1 / self.num_steps)
        self.amount += (amount - self.amount) * weight
        self.base += (base - self.base) * weight


@dataclass(slots=True)
class _RowTime:
    """The seconds that one more row takes: the slope of a line through the steps, by weighted least squares."""

    slope: float = 0.0  # 0: not known yet
    rows: float = 0.0  # weighted means
    seconds: float = 0.0
    variance: float = 0.0  # of rows
    covariance: float = 0.0  # of rows and seconds
    num_steps: int = 0

    def add(self, num_rows: int, seconds: float) -> None:
        self.num_steps += 1
        weight = max(_ROW_WEIGHT, 1 / self.num_steps)
        from_mean = num_rows - self.rows
        self.rows += weight * from_mean
        self.variance = (1 - weight) * (self.variance + weight * from_mean**2)
        self.covariance = (1 - weight) * (self.covariance + weight * from_mean * (seconds - self.seconds))
        self.seconds += weight * (seconds - self.seconds)
        if self.variance > (_MIN_SPREAD * self.rows) ** 2:
            self.slope = max(0.0, self.covariance / self.variance)


@dataclass(slots=True)
class _Kinds:
    plain: _Ratio = field(default_factory=_Ratio)  # seconds per token
    drafting: _Ratio = field(default_factory=_Ratio)
    row_time: _RowTime = field(default_factory=_RowTime)
    num_steps: int = 0


class DraftGain:
    """Decides by the measured gain. The first steps of a batch size are plain, the next ones draft."""

    def __init__(self, min_gain: float, *, runs_ahead: bool) -> None:
        """Create an empty record.

        Args:
            min_gain: Drafts are off where tokens per second grow by a smaller factor; 0: they are never off.
            runs_ahead: Whether plain steps run ahead of the device. Then a step in which drafts were allowed counts as
                drafting even if no proposal was found, because it did not run ahead.
        """
        self._min_gain = min_gain
        self._runs_ahead = runs_ahead
        self._by_size: defaultdict[int, _Kinds] = defaultdict(_Kinds)
        self._tokens_each = _Ratio()  # per sequence of steps with drafts, of all sizes
        self._recorded: set[int] = set()  # numbers of rows whose next step does not prepare kernels
        self._num_steps = 0

    def is_on(self, num_sequences: int) -> bool:
        if self._min_gain == 0.0:
            return True
        kinds = self._by_size[num_sequences.bit_length()]
        if kinds.plain.num_steps < _TRIAL_STEPS:
            return False
        if self._tokens_each.num_steps >= _BOUND_STEPS and self._tokens_each.mean < self._min_gain:
            return self._num_steps % _STEPS_BETWEEN_TRIALS == 0
        if kinds.drafting.num_steps < _BOUND_STEPS:
            return True
        is_hopeless = kinds.plain.mean < _HOPELESS * kinds.drafting.mean
        trial_steps = _BOUND_STEPS if is_hopeless else _TRIAL_STEPS
        if kinds.drafting.num_steps < trial_steps:
            return True
        pays = kinds.plain.mean >= self._min_gain * kinds.drafting.mean
        is_trial = kinds.num_steps % _STEPS_BETWEEN_TRIALS < trial_steps
        return pays != is_trial

    def needed_chance(self, num_sequences: int) -> float:
        """Return the chance to be right that a draft needs to pay: its time by the tokens of that time; 0: unknown."""
        kinds = self._by_size[num_sequences.bit_length()]
        if self._min_gain == 0.0 or not kinds.row_time.slope:
            return 0.0
        token_seconds = min(kind.mean for kind in (kinds.plain, kinds.drafting) if kind.num_steps)
        return min(kinds.row_time.slope / token_seconds, _MAX_NEED)

    def record(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Record a step without prompts, right after it. Rows beyond the sequences are drafts."""
        if self._min_gain == 0.0 or not num_tokens:
            return
        is_drafting = num_rows > num_sequences or (self._runs_ahead and self.is_on(num_sequences))
        self._num_steps += 1
        if is_drafting:
            self._tokens_each.add(num_tokens, num_sequences)
        if num_rows <= _RECORDED_ROWS and num_rows not in self._recorded:
            self._recorded.add(num_rows)
            return
        kinds = self._by_size[num_sequences.bit_length()]
        (kinds.drafting if is_drafting else kinds.plain).add(seconds, num_tokens)
        if is_drafting or not self._runs_ahead:
            kinds.row_time.add(num_rows, seconds)
        kinds.num_steps += 1
