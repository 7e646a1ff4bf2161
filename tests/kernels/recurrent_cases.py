"""Checks of an implementation of the recurrent operators against torch in float64, for any device."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kernels.recurrent.batch import DraftedStates, PendingInputs, RecurrentBatch, StateHeads, StateRates
from kernels.recurrent.chunks import CHUNK
from kernels.recurrent.operators import RecurrentOperators
from kernels.recurrent.reference import TorchRecurrent
from kernels.scaled import plain_rows

EPS = 1e-6
# In 16 bits, the sigmoid and the product are rounded. Each rounding changes a value by at most 2^-8 of itself in
# bfloat16, and by 2^-11 in float16. Float32 sums of 128 products differ by 1e-6.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
STATE_TOLERANCE = 1e-5
CHUNKS_TOLERANCE = 2**-14  # in bfloat16, products of chunks have 16 bits; a state follows from two of them


@dataclass(frozen=True)
class Shape:
    heads: StateHeads
    width: int
    lengths: tuple[int, ...]
    blocks: tuple[int, ...]  # of the state of each sequence; 0: zeros, not written
    computed: tuple[int, ...] = ()  # tokens of each sequence before this step

    def state_tolerance(self, dtype: torch.dtype) -> float:
        is_in_terms = dtype is torch.bfloat16 and max(self.lengths) >= CHUNK
        return CHUNKS_TOLERANCE if is_in_terms else STATE_TOLERANCE

    @property
    def channels(self) -> int:
        return 2 * self.heads.key_size + self.heads.value_size


SHAPES = {
    "decode": Shape(StateHeads(2, 4, 16, 32), 4, (1, 1, 1), (3, 1, 2)),
    "prompts beside a decode": Shape(StateHeads(1, 3, 32, 16), 4, (40, 1, 73, 2), (2, 5, 1, 4)),
    "a row of padding and one without a state": Shape(StateHeads(2, 2, 16, 16), 2, (3, 0, 5), (1, 0, 0)),
    "heads of 128": Shape(StateHeads(1, 2, 128, 128), 4, (5, 1), (1, 2)),
    "prompts cut anywhere": Shape(
        StateHeads(1, 2, 16, 32), 4, (64, 0, 130, 63, 65), (1, 0, 4, 3, 2), (63, 7, 100, 5, 64)
    ),
    "decodes of many sequences": Shape(StateHeads(1, 2, 16, 128), 4, (1,) * 64, tuple(range(1, 65))),
    "long prompts": Shape(StateHeads(1, 2, 128, 64), 4, (100, 1, 64), (1, 3, 2)),
}


@dataclass(frozen=True)
class Inputs:
    qkvz: Tensor  # [T, channels + value_size]
    weight: Tensor
    gates: Tensor  # [T, 2 * num_heads]
    decay: Tensor
    step_bias: Tensor
    norm: Tensor  # of a head
    bias: Tensor  # of the convolution
    skip: Tensor
    wide_norm: Tensor  # of all heads
    inputs: Tensor  # states of the convolution
    delta: Tensor  # states of the delta rule

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: str) -> "Inputs":
        generator = torch.Generator().manual_seed(1)
        num_tokens, num_blocks, heads = sum(shape.lengths), max(shape.blocks) + 1, shape.heads

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        inputs = draw(num_blocks, shape.width - 1, shape.channels)
        delta = draw(num_blocks, heads.num_heads, heads.key_dim, heads.value_dim)
        inputs[0] = delta[0] = 0.0
        drawn = cls(
            draw(num_tokens, shape.channels + heads.value_size), draw(shape.width, shape.channels),
            3 * draw(num_tokens, 2 * heads.num_heads), -draw(heads.num_heads).exp(), draw(heads.num_heads),
            draw(heads.value_dim), draw(shape.channels), draw(heads.num_heads), draw(heads.value_size), inputs, delta,
        )  # fmt: skip
        moved = {name: value.to(device) for name, value in vars(drawn).items()}
        return cls(**moved | {name: moved[name].to(dtype) for name in ("qkvz", "gates")})


def batch_of(
    lengths: tuple[int, ...], blocks: tuple[int, ...], device: str = "cpu", computed: tuple[int, ...] = ()
) -> RecurrentBatch:
    """Return a step of these tokens of each sequence, after those `computed`; default: none."""
    seq_lens = [old + new for old, new in zip(computed or (0,) * len(lengths), lengths, strict=True)]
    starts, ends, places = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in ([0, *accumulate(lengths)], seq_lens, blocks)
    )
    return RecurrentBatch(starts, ends, places, max_query_len=max(lengths))


def check(operators: RecurrentOperators, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> None:
    """Check each operator on the outputs of the exact one before it."""
    given, tolerance = Inputs.random(shape, dtype, device), TOLERANCES[dtype]
    heads, batch, exact = shape.heads, batch_of(shape.lengths, shape.blocks, device, shape.computed), TorchRecurrent()
    inputs, delta = given.inputs.clone(), given.delta.clone()
    exact_inputs, exact_delta = given.inputs.double(), given.delta.double()
    qkv, gate = given.qkvz[:, : shape.channels], given.qkvz[:, shape.channels :]
    expected = exact.causal_conv(qkv.double(), given.weight.double(), None, exact_inputs, batch)
    convolved = operators.causal_conv(qkv, given.weight, None, inputs, batch)
    _assert_close(convolved, expected, tolerance)
    _assert_close(inputs, exact_inputs, 1e-6)
    rates = StateRates(given.decay, given.step_bias)
    exact_rates = StateRates(given.decay.double(), given.step_bias.double())
    expected = exact.gated_delta(convolved.double(), given.gates.double(), exact_rates, exact_delta, heads, batch)
    mixed = operators.gated_delta(convolved, given.gates, rates, delta, heads, batch)
    _assert_close(mixed, expected, tolerance)
    _assert_close(delta, exact_delta, shape.state_tolerance(dtype))
    unwritten = [block for block in range(len(delta)) if block == 0 or block not in shape.blocks]
    assert torch.equal(delta[unwritten], given.delta[unwritten])
    assert torch.equal(inputs[unwritten], given.inputs[unwritten])
    expected = exact.gated_rms_norm(mixed.double(), gate.double(), given.norm.double(), EPS)
    _assert_close(plain_rows(operators.gated_rms_norm(mixed, gate, given.norm, EPS)), expected, tolerance)
    expected = exact.multiply_sigmoid(mixed.double(), gate.double())
    _assert_close(plain_rows(operators.multiply_sigmoid(mixed, gate)), expected, tolerance)


def check_mamba(operators: RecurrentOperators, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> None:
    """Check the operators of Mamba-2, and that nothing is written to the state of zeros."""
    given, tolerance = Inputs.random(shape, dtype, device), TOLERANCES[dtype]
    heads, batch, exact = shape.heads, batch_of(shape.lengths, shape.blocks, device, shape.computed), TorchRecurrent()
    states, exact_states = given.delta.clone(), given.delta.double()
    qkv, gate = given.qkvz[:, : shape.channels], given.qkvz[:, shape.channels :]
    weight, bias = given.weight, given.bias
    expected = exact.causal_conv(qkv.double(), weight.double(), bias.double(), given.inputs.double(), batch)
    convolved = operators.causal_conv(qkv, weight, bias, given.inputs.clone(), batch)
    _assert_close(convolved, expected, tolerance)
    rates, step = StateRates(given.decay, given.step_bias), given.gates[:, 1 : 1 + heads.num_heads]
    exact_rates = StateRates(given.decay.double(), given.step_bias.double())
    expected = exact.state_space(
        convolved.double(), step.double(), exact_rates, given.skip.double(), exact_states, heads, batch
    )
    mixed = operators.state_space(convolved, step, rates, given.skip, states, heads, batch)
    _assert_close(mixed, expected, tolerance)
    _assert_close(states, exact_states, shape.state_tolerance(dtype))
    assert torch.equal(states[0], given.delta[0])
    for num_groups in (1, heads.num_heads):
        expected = exact.rms_norm_of_gated(mixed.double(), gate.double(), given.wide_norm.double(), EPS, num_groups)
        found = plain_rows(operators.rms_norm_of_gated(mixed, gate, given.wide_norm, EPS, num_groups))
        _assert_close(found, expected, tolerance)


def check_chunks(operators: RecurrentOperators, dtype: torch.dtype, device: str = "cpu") -> None:
    """Check that the states and outputs of a sequence have the same bits after any chunks."""
    _check_cuts(operators, dtype, device, 24, ((16, 8), (1, 1, 1, 21), (7, 10, 1, 6), (1,) * 24))


def check_chunks_of_64(operators: RecurrentOperators, dtype: torch.dtype, device: str = "cpu") -> None:
    """Check that cuts at multiples of 64 before the last 64 tokens change no bit of the states and outputs."""
    _check_cuts(operators, dtype, device, 200, ((128, 72), (64, 64, 72)))


def _check_cuts(
    operators: RecurrentOperators, dtype: torch.dtype, device: str, length: int, cuts: tuple[tuple[int, ...], ...]
) -> None:
    shape = Shape(StateHeads(1, 2, 16, 32), 4, (length,), (2,))
    given = Inputs.random(shape, dtype, device)
    whole = _run(operators, given, shape, (length,))
    for lengths in cuts:
        assert all(torch.equal(*pair) for pair in zip(whole, _run(operators, given, shape, lengths), strict=True))


def _run(operators: RecurrentOperators, given: Inputs, shape: Shape, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    inputs, delta, space, outputs = given.inputs.clone(), given.delta.clone(), given.delta.clone(), list[Tensor]()
    rates = StateRates(given.decay, given.step_bias)
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        rows = slice(end - length, end)
        batch = batch_of((length,), shape.blocks, str(given.qkvz.device), (end - length,))
        qkv = operators.causal_conv(given.qkvz[rows, : shape.channels], given.weight, given.bias, inputs, batch)
        gate, gates = given.qkvz[rows, shape.channels :], given.gates[rows]
        mixed = operators.gated_delta(qkv, gates, rates, delta, shape.heads, batch)
        gated = plain_rows(operators.gated_rms_norm(mixed, gate, given.norm, EPS))
        outputs.append(plain_rows(operators.multiply_sigmoid(gated, gate)))
        step = gates[:, : shape.heads.num_heads]
        mixed = operators.state_space(qkv, step, rates, given.skip, space, shape.heads, batch)
        outputs.append(plain_rows(operators.rms_norm_of_gated(mixed, gate, given.wide_norm, EPS, 2)))
    return inputs, delta, space, torch.cat(outputs[::2]), torch.cat(outputs[1::2])


# Of each of two sequences: the tokens of a step that stand, and wrong drafts after them; None: a step without drafts.
DRAFTED_STEPS = (
    ((1, None), (3, 0)),
    ((1, 3), (2, 2)),
    ((4, 0), (1, None)),
    ((2, 1), (1, None)),
    ((1, None), (1, 2)),
    ((1, None), (1, None)),
)


def check_drafts(operators: RecurrentOperators, dtype: torch.dtype, device: str = "cpu") -> None:
    """Check that wrong drafts change no bit of the states and outputs of the tokens that stand."""
    num_tokens = [sum(steps[sequence][0] for steps in DRAFTED_STEPS) for sequence in (0, 1)]
    shape = Shape(StateHeads(2, 4, 16, 32), 4, (sum(num_tokens),), (2,))
    given, most = Inputs.random(shape, dtype, device), 4
    firsts, blocks = [0, num_tokens[0]], (2, 1, 0)  # and a row of padding
    plain = [
        _run(operators, _some(given, first, count), shape, (1,) * count)
        for first, count in zip(firsts, num_tokens, strict=True)
    ]
    pool = _Pool(given, shape, most)
    wrong = torch.Generator().manual_seed(2)
    pending, outputs = [0, 0], [list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()]
    for steps in DRAFTED_STEPS:
        rows, counts, kept = [], [], []
        for sequence, (right, num_wrong) in enumerate(steps):
            real = slice(firsts[sequence], firsts[sequence] + right)
            noise = torch.randint(len(given.qkvz), (num_wrong or 0,), generator=wrong)
            rows.append(torch.cat((torch.arange(real.start, real.stop), noise)))
            counts.append(len(rows[-1]))
            kept.append(pending[sequence] + (counts[-1] if num_wrong is None else 0))
        chosen = torch.cat((*rows, torch.zeros(1, dtype=torch.int64))).to(device)
        numbers = torch.tensor([[*pending, 0], [*kept, 1]], dtype=torch.int32, device=device)
        batch = replace(batch_of((*counts, 1), blocks, device), drafts=DraftedStates(*numbers))
        found = pool.run(operators, given, chosen, batch)
        for sequence, (right, num_wrong) in enumerate(steps):
            first = sum(counts[:sequence])
            outputs[sequence].append(tuple(part[first : first + right] for part in found))
            pending[sequence] = 0 if num_wrong is None else right
            firsts[sequence] += right
    for sequence, (inputs, delta, space, *expected) in enumerate(plain):
        block = blocks[sequence]
        assert pending[sequence] == 0  # the last step has no drafts, so states are those of all tokens
        assert all(
            torch.equal(torch.cat(parts), whole)
            for parts, whole in zip(zip(*outputs[sequence], strict=True), expected, strict=True)
        )
        assert torch.equal(pool.inputs[block, :3], inputs[2])
        assert torch.equal(pool.delta[block], delta[2]) and torch.equal(pool.space[block], space[2])


def _some(given: Inputs, first: int, count: int) -> Inputs:
    rows = slice(first, first + count)
    return replace(given, qkvz=given.qkvz[rows], gates=given.gates[rows])


class _Pool:
    """States as in the state pool: of the rule, inputs of the convolution, and what is kept of drafts."""

    def __init__(self, given: Inputs, shape: Shape, most: int) -> None:
        heads, channels, width = shape.heads, shape.channels, shape.width
        num_gates = 2 * heads.num_heads
        sizes = (
            heads.state_size,
            heads.state_size,
            (width - 1 + most) * channels,
            most * channels,
            2 * most * num_gates,
        )
        pool = torch.full((3, 2, sum(sizes)), torch.nan, device=given.qkvz.device)[:, 1]
        states, space, inputs, qkv, gates = pool.split(sizes, dim=1)
        self.heads, self.shape = heads, shape
        self.delta, self.space = (
            part.unflatten(1, (heads.num_heads, heads.key_dim, heads.value_dim)) for part in (states, space)
        )
        self.inputs = inputs.unflatten(1, (-1, channels))
        self.qkv = qkv.unflatten(1, (most, channels))
        of_delta, of_space, _ = gates.split((most * num_gates, most * heads.num_heads, most * heads.num_heads), dim=1)
        self.gates, self.steps = of_delta.unflatten(1, (most, -1)), of_space.unflatten(1, (most, -1))
        for block in (1, 2):  # each sequence starts from the state of block 2, as the plain runs
            self.inputs[block, : width - 1], self.delta[block], self.space[block] = (
                given.inputs[2],
                given.delta[2],
                given.delta[2],
            )
        self.inputs[0], self.delta[0], self.space[0] = 0.0, 0.0, 0.0

    def run(
        self, operators: RecurrentOperators, given: Inputs, rows: Tensor, batch: RecurrentBatch
    ) -> tuple[Tensor, Tensor]:
        shape, heads = self.shape, self.heads
        x, gate, gates = given.qkvz[rows, : shape.channels], given.qkvz[rows, shape.channels :], given.gates[rows]
        rates, step = StateRates(given.decay, given.step_bias), gates[:, : heads.num_heads]
        qkv = operators.causal_conv(x, given.weight, given.bias, self.inputs, batch)
        mixed = operators.gated_delta(qkv, gates, rates, self.delta, heads, batch, PendingInputs(self.qkv, self.gates))
        normed = operators.multiply_sigmoid(plain_rows(operators.gated_rms_norm(mixed, gate, given.norm, EPS)), gate)
        pending = PendingInputs(self.qkv, self.steps)
        mixed = operators.state_space(qkv, step, rates, given.skip, self.space, heads, batch, pending)
        for kept, own in (
            (self.inputs[:, shape.width - 1 :], x),
            (self.qkv, qkv),
            (self.gates, gates),
            (self.steps, step),
        ):
            operators.keep_inputs(own, kept, batch)
        return plain_rows(normed), plain_rows(operators.rms_norm_of_gated(mixed, gate, given.wide_norm, EPS, 2))


def _assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max(), f"{error} of {expected.abs().max()}"
