"""The recurrent layers of one step, with their states in the state pool."""

from dataclasses import dataclass

from torch import Tensor

from engine_worker.model.linear import Input
from engine_worker.model.model_input import ModelInput
from kernels.recurrent.batch import PendingInputs, RecurrentBatch, StateHeads, StateRates
from kernels.recurrent.operators import RecurrentOperators
from kernels.scaled import Scaling


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """The weights of a Gated DeltaNet layer besides its linear layers.

    Attributes:
        heads: The heads.
        conv: [width, channels] float32.
        rates: With decay -exp(A_log).
        norm: [value_dim] float32.
        eps: Of the norm.
    """

    heads: StateHeads
    conv: Tensor
    rates: StateRates
    norm: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class StateSpaceWeights:
    """The weights of a Mamba-2 layer besides its linear layers; channels are those of C, B and x.

    Attributes:
        heads: The heads.
        conv: [width, channels] float32.
        conv_bias: [channels] float32; None: none.
        rates: With decay -exp(A_log).
        skip: [num_heads] float32, D.
        norm: [value_size] float32.
        eps: Of the norm.
    """

    heads: StateHeads
    conv: Tensor
    conv_bias: Tensor | None
    rates: StateRates
    skip: Tensor
    norm: Tensor
    eps: float


class RecurrentPlan:
    """What the recurrent layers of a step share."""

    def __init__(
        self,
        operators: RecurrentOperators,
        states: Tensor | None,
        model_input: ModelInput,
        *,
        may_keep_none: bool = True,
    ) -> None:
        """Plan a step; states is [num_blocks, layers, values] float32, and `may_keep_none` as in RecurrentBatch."""
        self._operators = operators
        assert states is not None and model_input.state_blocks is not None, "the model has recurrent layers"
        self._states, self._most_kept = states, model_input.max_joined
        drafted = model_input.drafted_rows
        self._batch = RecurrentBatch(
            model_input.query_start_loc if drafted is None else drafted.query_start_loc,
            model_input.seq_lens,
            model_input.state_blocks,
            max_query_len=max(model_input.max_query_len, 1 if drafted is None else model_input.max_joined),
            drafts=None if drafted is None else drafted.states,
            may_keep_none=may_keep_none,
        )

    def follow(self, model_input: ModelInput) -> None:
        """Use the states of another step of the same shape, for a recorded program."""
        assert model_input.state_blocks is not None
        self._batch.state_blocks.copy_(model_input.state_blocks)

    def gated_delta(
        self,
        qkvz: Tensor,
        gates: Tensor,
        weights: GatedDeltaWeights,
        layer: int,
        scaling: Scaling,
        rows: Tensor | None = None,
    ) -> Input:
        """Mix the tokens of each sequence, and update the states of recurrent layer number `layer`.

        Args:
            qkvz: [T, channels + value_size], the inputs of the convolution, then the output gate z.
            gates: [T, 2 * num_heads], beta, then the step.
            weights: Of the layer.
            layer: Its place in the state pool.
            scaling: How the outputs are quantized.
            rows: Tokens of which outputs are wanted; None: all.

        Returns:
            [N, value_size], normed and gated.
        """
        heads, batch, operators, channels = weights.heads, self._batch, self._operators, weights.conv.shape[1]
        layer_states = self._states_of(layer, heads, weights.conv, gates.shape[1])
        qkv = operators.causal_conv(qkvz[:, :channels], weights.conv, None, layer_states.inputs, batch)
        mixed = operators.gated_delta(
            qkv, gates, weights.rates, layer_states.of_heads, heads, batch, layer_states.pending
        )
        self._keep(layer_states, qkvz[:, :channels], qkv, gates)
        mixed, gate = _of_rows(rows, mixed, qkvz[:, channels:])
        return operators.gated_rms_norm(mixed, gate, weights.norm, weights.eps, scaling)

    def state_space(
        self, entered: Tensor, weights: StateSpaceWeights, layer: int, scaling: Scaling, rows: Tensor | None = None
    ) -> Input:
        """Mix the tokens of each sequence, and update the states of recurrent layer number `layer`.

        Args:
            entered: [T, channels + value_size + num_heads], the inputs of the convolution, z, and dt.
            weights: Of the layer.
            layer: Its place in the state pool.
            scaling: How the outputs are quantized.
            rows: Tokens of which outputs are wanted; None: all.

        Returns:
            [N, value_size], gated and normed.
        """
        heads, batch, operators = weights.heads, self._batch, self._operators
        channels, gate, step = entered.split((weights.conv.shape[1], heads.value_size, heads.num_heads), dim=1)
        layer_states = self._states_of(layer, heads, weights.conv, heads.num_heads)
        qkv = operators.causal_conv(channels, weights.conv, weights.conv_bias, layer_states.inputs, batch)
        mixed = operators.state_space(
            qkv, step, weights.rates, weights.skip, layer_states.of_heads, heads, batch, layer_states.pending
        )
        self._keep(layer_states, channels, qkv, step)
        mixed, gate = _of_rows(rows, mixed, gate)
        return operators.rms_norm_of_gated(mixed, gate, weights.norm, weights.eps, heads.num_key_heads, scaling)

    def _states_of(self, layer: int, heads: StateHeads, conv: Tensor, num_gates: int) -> "_LayerStates":
        """Return the layer's part of the pool, for a convolution with these weights."""
        width, channels = conv.shape
        most_kept = self._most_kept if self._batch.drafts is not None else 0
        sizes = (heads.state_size, (width - 1 + most_kept) * channels, most_kept * channels, most_kept * num_gates)
        states = self._states[:, layer, : sum(sizes)]
        of_heads, inputs, qkv, gates = states.split(sizes, dim=1)
        pending = (
            PendingInputs(qkv.unflatten(1, (-1, channels)), gates.unflatten(1, (-1, num_gates))) if most_kept else None
        )
        return _LayerStates(
            of_heads=of_heads.unflatten(1, (heads.num_heads, heads.key_dim, heads.value_dim)),
            inputs=inputs.unflatten(1, (-1, channels)),
            pending=pending,
        )

    def _keep(self, states: "_LayerStates", x: Tensor, qkv: Tensor, gates: Tensor) -> None:
        """Keep the inputs of tokens of sequences with drafts."""
        if states.pending is None:
            return
        new_inputs = states.inputs[:, -self._most_kept :]
        for rows, kept in ((x, new_inputs), (qkv, states.pending.qkv), (gates, states.pending.gates)):
            self._operators.keep_inputs(rows, kept, self._batch)


def _of_rows(rows: Tensor | None, mixed: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return (mixed, gate) if rows is None else (mixed[rows], gate[rows])


@dataclass(frozen=True, slots=True)
class _LayerStates:
    """One layer's part of the state pool.

    Attributes:
        of_heads: [N, num_heads, key_dim, value_dim].
        inputs: [N, rows, channels], the last inputs of the convolution, then those of a step with drafts.
        pending: What else a step with drafts keeps; None without drafts.
    """

    of_heads: Tensor
    inputs: Tensor
    pending: PendingInputs | None
