"""An EAGLE-3 head (https://arxiv.org/abs/2503.01840) as a frozen value, read from the head's config.json.

Checkpoints of EAGLE, SpecForge and speculators are supported. The last has the layer in `transformer_layer_config`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_worker.model.architectures import spec_from_json
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import AttentionSpec
from engine_worker.model.specs.names import NamesSpec

_KIND = "eagle3"


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec:
    """A head for a target network with the same hidden size and the same attention heads."""

    layer: LayerSpec  # its attention reads the token's embedding beside the hidden state
    hidden_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    norm_eps: float
    tapped_layers: tuple[int, ...]  # the target's layers whose inputs the head reads
    keeps_normed: bool  # the residual starts with the normed hidden state
    prefix: str = ""  # of its tensors: all of the files are its own

    def num_parameters(self, hidden: int) -> int:
        """Return the parameters, without an embedding of its own. `hidden`: the hidden size of both."""
        tensors = self.layer.tensors(NamesSpec(), hidden)
        beside_layer = (len(self.tapped_layers) * hidden + self.draft_vocab_size + 2) * hidden
        wider = hidden * sum(self.attention.qkv_sizes)  # queries, keys and values also read the embedding
        return sum(math.prod(tensor.shape) for tensor in tensors) + wider + beside_layer

    @property
    def attention(self) -> AttentionSpec:
        assert isinstance(self.layer.mixer, AttentionSpec), "checked when the head was read"
        return self.layer.mixer


def eagle3_spec(config: Mapping[str, Any], target: ModelSpec) -> Eagle3Spec:
    """Return the head of a config.json.

    Raises:
        ValueError: If it is not such a head, or does not fit its target; the message names the field.
    """
    config = {**config.get("transformer_layer_config", {}), **config}
    if not any(_KIND in str(name).lower() for name in config.get("architectures") or []):
        raise ValueError(
            "--speculative-config: model: config.json: architectures: expected one with Eagle3 in its name; "
            f"got {config.get('architectures')}"
        )
    own = spec_from_json({**config, "num_hidden_layers": 1, "max_position_embeddings": 1}, {})
    _check_fits(own, target)
    nested = config.get("eagle_config") or {}
    stated = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    return Eagle3Spec(
        layer=own.layers[0],
        hidden_size=own.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=int(config.get("draft_vocab_size") or target.vocab_size),
        norm_eps=own.norm_eps,
        tapped_layers=_tapped_layers(stated, target.num_layers),
        keeps_normed=bool(config.get("norm_before_residual", False)),
    )


def _check_fits(own: ModelSpec, target: ModelSpec) -> None:
    """Check the sizes that both must share: the head's keys and values are one more layer of the target's KV pool."""
    if not isinstance(own.layers[0].mixer, AttentionSpec):
        raise ValueError("--speculative-config: model: config.json: the head's layer must be attention")
    for field, key in (
        ("hidden_size", "hidden_size"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"),
        ("vocab_size", "vocab_size"),
    ):
        if getattr(own, field) != getattr(target, field):
            raise ValueError(
                f"--speculative-config: model: config.json: {key}: expected {getattr(target, field)}, "
                f"that of --model; got {getattr(own, field)}"
            )


def _tapped_layers(stated: object, num_layers: int) -> tuple[int, ...]:
    """Return the layers in `stated`, or those of the paper's code: the third, the middle, and the third last."""
    layers = tuple(stated) if isinstance(stated, list) else (2, num_layers // 2, num_layers - 3)
    if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in layers):
        raise ValueError(
            "--speculative-config: model: config.json: eagle_aux_hidden_state_layer_ids: "
            f"expected layers from 0 to {num_layers - 1}; got {list(layers)}"
        )
    return layers
