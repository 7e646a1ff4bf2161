"""The operators of layers with a recurrent state, as each device implements them."""

from typing import Protocol

from torch import Tensor

from kernels.recurrent.batch import DeltaRates, GatedDeltaHeads, RecurrentBatch


class RecurrentOperators(Protocol):
    """Operators over the tokens [T] of a step; each output depends on its own sequence only."""

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, batch: RecurrentBatch) -> Tensor:
        """Convolve each channel over time, without a bias, and apply SiLU.

        Args:
            x: [T, C], may be strided.
            weight: [W, C] float32; the last tap is that of the token itself.
            states: [N, W - 1, C] float32, the last inputs of each sequence, oldest first; updated.
            batch: The sequences.

        Returns:
            [T, C], of x's dtype.
        """

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        rates: DeltaRates,
        states: Tensor,
        heads: GatedDeltaHeads,
        batch: RecurrentBatch,
    ) -> Tensor:
        """Run the gated delta rule (https://arxiv.org/abs/2412.06464) over each sequence, from its state.

        Args:
            qkv: [T, 2 * key_size + value_size], convolved; queries and keys are normed here.
            gates: [T, 2 * num_heads]: beta, the logits of the share of a value that is written, then the step.
            rates: The state decays by exp(decay * softplus(step + step_bias)).
            states: [N, num_heads, key_dim, value_dim] float32; updated.
            heads: The heads.
            batch: The sequences.

        Returns:
            [T, value_size], of qkv's dtype.
        """

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm each head of x [T, H * D] by weight [D] float32, times SiLU of gate [T, H * D], which may be strided."""

    def multiply_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x [T, N] times the sigmoid of gate [T, N], which may be strided; x may be overwritten."""
