"""What the recurrent layers of one step share."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """The sequences of a step.

    Attributes:
        query_start_loc: [S + 1] int32, start of each sequence's tokens.
        seq_lens: [S] int32, tokens of each sequence up to the end of this step.
        state_blocks: [S] int32, the block of each sequence's state, which the step overwrites; 0: zeros, not written.
        max_query_len: The most tokens of a sequence.
        drafts: What the states know of drafts; None: there are none.
        may_keep_none: A sequence may not write its state: of block 0, or with drafts.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    state_blocks: Tensor
    max_query_len: int
    drafts: "DraftedStates | None" = None
    may_keep_none: bool = True


@dataclass(frozen=True, slots=True)
class DraftedStates:
    """The sequences of a step with drafts, whose states must not contain a wrong draft.

    A step with drafts keeps its tokens' inputs beside the state. The next step applies the inputs of those that stand,
    the pending ones, and then its own tokens.

    Attributes:
        pending: [S] int32, pending tokens of each sequence.
        kept: [S] int32, after how many tokens, pending ones first, the state is kept: after the pending ones if the
            step has drafts, else after all.
    """

    pending: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class PendingInputs:
    """What one layer keeps of the tokens of a step with drafts, beside its states; P is the most of them.

    Attributes:
        qkv: [N, P, channels] float32, convolved.
        gates: [N, P, G] float32.
    """

    qkv: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class StateRates:
    """How fast the state of each value head decays: by exp(decay * softplus(step + step_bias)) per token.

    Attributes:
        decay: [num_heads] float32, below 0.
        step_bias: [num_heads] float32.
    """

    decay: Tensor
    step_bias: Tensor


@dataclass(frozen=True, slots=True)
class StateHeads:
    """The heads of a recurrent layer; each query and key head serves consecutive value heads.

    Attributes:
        num_key_heads: Heads of queries, and of keys.
        num_heads: Heads of values.
        key_dim: Elements of a query or key head.
        value_dim: Elements of a value head.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def state_size(self) -> int:
        return self.value_size * self.key_dim
