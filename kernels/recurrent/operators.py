"""The operators of layers with a recurrent state, as each device implements them."""

from typing import Protocol

from torch import Tensor

from kernels.recurrent.batch import PendingInputs, RecurrentBatch, StateHeads, StateRates
from kernels.scaled import Scaled, Scaling


class RecurrentOperators(Protocol):
    """Operators over the tokens [T] of a step; each output depends on its own sequence only.

    The last three may quantize their results for the next linear layer; on a CPU none does.
    """

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        """Convolve each channel over time, and apply SiLU.

        Args:
            x: [T, C], may be strided.
            weight: [W, C] float32; the last tap is that of the token itself.
            bias: [C] float32; None: none.
            states: [N, W - 1, C] float32, the last inputs of each sequence, oldest first; updated. With drafts those
                of pending tokens follow: [N, W - 1 + P, C].
            batch: The sequences.

        Returns:
            [T, C], of x's dtype.
        """

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        rates: StateRates,
        states: Tensor,
        heads: StateHeads,
        batch: RecurrentBatch,
        pending: PendingInputs | None = None,
    ) -> Tensor:
        """Run the gated delta rule (https://arxiv.org/abs/2412.06464) over each sequence, from its state.

        Args:
            qkv: [T, 2 * key_size + value_size], convolved; queries and keys are normed here.
            gates: [T, 2 * num_heads]: beta, the logits of the share of a value that is written, then the step.
            rates: Of the decay.
            states: [N, num_heads, key_dim, value_dim] float32; updated.
            heads: The heads.
            batch: The sequences.
            pending: What the last step kept, if it had drafts.

        Returns:
            [T, value_size], of qkv's dtype.
        """

    def state_space(
        self,
        qkv: Tensor,
        step: Tensor,
        rates: StateRates,
        skip: Tensor,
        states: Tensor,
        heads: StateHeads,
        batch: RecurrentBatch,
        pending: PendingInputs | None = None,
    ) -> Tensor:
        """Run Mamba-2 (https://arxiv.org/abs/2405.21060) over each sequence, from its state.

        Args:
            qkv: [T, 2 * key_size + value_size], convolved: C, B and x of the paper.
            step: [T, num_heads], may be strided; softplus(step + step_bias) is also the factor of what is written.
            rates: Of the decay.
            skip: [num_heads] float32, D of the paper: the factor of x that is added to its output.
            states: [N, num_heads, key_dim, value_dim] float32; updated.
            heads: The heads; the paper's groups are the key heads.
            batch: The sequences.
            pending: What the last step kept, if it had drafts.

        Returns:
            [T, value_size], of qkv's dtype.
        """

    def keep_inputs(self, rows: Tensor, kept: Tensor, batch: RecurrentBatch) -> None:
        """Keep the inputs of the tokens of sequences with drafts, whose states the step does not advance.

        Args:
            rows: [T, C], may be strided.
            kept: [N, P, C] float32; written.
            batch: The sequences.
        """

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, scaling: Scaling = Scaling.NONE
    ) -> Tensor | Scaled:
        """Norm each head of x [T, H * D] by weight [D] float32, times SiLU of gate [T, H * D], which may be strided."""

    def rms_norm_of_gated(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, scaling: Scaling = Scaling.NONE
    ) -> Tensor | Scaled:
        """Norm x [T, N] times SiLU of gate [T, N], which may be strided.

        Each of `num_groups` parts of a row is normed alone; weight is [N] float32.
        """

    def multiply_sigmoid(self, x: Tensor, gate: Tensor, scaling: Scaling = Scaling.NONE) -> Tensor | Scaled:
        """Return x [T, N] times the sigmoid of gate [T, N], which may be strided; x may be overwritten."""
