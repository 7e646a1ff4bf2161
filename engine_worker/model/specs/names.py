"""The names of a checkpoint's tensors."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names of the tensors of experts.

    A name with `{expert}` is one module per expert. A name without it is one tensor of all experts, with its suffix.
    Without gates, `gate_up` has one name, that of up, as in NamesSpec.
    `stacked` has the names of gate and up, and of down, in checkpoints that stack the experts instead.
    """

    router: str = "mlp.gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    gate_up: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
    down: str = "mlp.experts.{expert}.down_proj"
    gate_up_bias: str = "mlp.experts.gate_up_proj_bias"  # biases of stacked tensors
    down_bias: str = "mlp.experts.down_proj_bias"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    stacked: tuple[str, str] | None = None

    @property
    def is_stacked(self) -> bool:
        return "{expert}" not in self.down

    def as_stored(self, stored: Iterable[str]) -> Self:
        """Return the names of stacked experts if one of the `stored` tensors has such a name."""
        if self.stacked is None or not any(name.endswith(self.stacked) for name in stored):
            return self
        gate_up, down = self.stacked
        return replace(self, gate_up=(gate_up,), down=down)


EXPERTS = ExpertNames()


@dataclass(frozen=True, kw_only=True)
class DeltaNames:
    """The names of the tensors of a Gated DeltaNet layer; the first linear layers are separate, or fused into two."""

    enter: tuple[str, ...] = (
        "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a",
    )  # fmt: skip
    conv: str = "linear_attn.conv1d"
    decay: str = "linear_attn.A_log"
    step_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


DELTA = DeltaNames()


@dataclass(frozen=True, kw_only=True)
class StateSpaceNames:
    """The names of the tensors of a Mamba-2 layer."""

    enter: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    decay: str = "mamba.A_log"
    skip: str = "mamba.D"
    step_bias: str = "mamba.dt_bias"
    norm: str = "mamba.norm"
    out: str = "mamba.out_proj"

    @classmethod
    def under(cls, module: str) -> Self:
        """Return the names with another module's name than `mamba`."""
        usual = cls()
        names = {field.name: getattr(usual, field.name).replace("mamba", module) for field in fields(usual)}
        return cls(**names)


SPACE = StateSpaceNames()


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """The names of the tensors around a layer for multi-token prediction (MTP)."""

    prefix: str = "mtp."  # of all of them
    layer: str = "mtp.layers.0."
    project: str = "mtp.fc"
    embedding_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    norm: str = "mtp.norm"

    @classmethod
    def in_layer(cls, prefix: str) -> Self:
        """Return the names where MTP is one more layer of the network, as in DeepSeek-V3."""
        return cls(
            prefix=prefix,
            layer=prefix,
            project=f"{prefix}eh_proj",
            embedding_norm=f"{prefix}enorm",
            hidden_norm=f"{prefix}hnorm",
            norm=f"{prefix}shared_head.norm",
        )


@dataclass(frozen=True, kw_only=True)
class NamesSpec:
    """The names of a checkpoint's tensors; several names of one layer are concatenated in this order."""

    layer: str = "model.layers.{index}."
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    conv: str = "conv.conv"
    conv_in: str = "conv.in_proj"
    conv_out: str = "conv.out_proj"
    delta: DeltaNames = DELTA
    space: StateSpaceNames = SPACE
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    experts: ExpertNames = EXPERTS
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
