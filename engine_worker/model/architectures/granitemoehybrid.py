"""Granite 4: Mamba-2 in most layers, attention without positions in the others; experts stand beside an MLP."""

from dataclasses import replace

from engine_worker.model.architectures import granite
from engine_worker.model.architectures.config_keys import (
    FULL,
    LINEAR,
    Config,
    mixers_by_type,
    number_of,
    positive_int,
    rope_of,
)
from engine_worker.model.architectures.experts_keys import router_spec
from engine_worker.model.architectures.granitemoe import NAMES as EXPERTS
from engine_worker.model.architectures.mamba_keys import layer_types_with_mamba, state_space_spec
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.attention import AttentionSpec, RopeSpec
from engine_worker.model.specs.experts import ExpertsSpec, Scoring
from engine_worker.model.specs.mlp import MlpSpec
from engine_worker.model.specs.state_space import StateSpaceSpec

_GATE_UP, _DOWN = ("shared_mlp.input_linear",), "shared_mlp.output_linear"
_NAMES = replace(
    EXPERTS,
    experts=replace(EXPERTS.experts, shared_gate_up=_GATE_UP, shared_down=_DOWN),
    gate_up=_GATE_UP,
    down=_DOWN,
)


def spec(config: Config, generation: Config) -> ModelSpec:
    dense = granite.decoder(config, generation)
    rotates = config.get("position_embedding_type") == "rope"
    attending = dense.layers[0].with_attention(rope=rope_of(config) if rotates else RopeSpec(dim=0))
    assert isinstance(attending.mixer, AttentionSpec)
    types = layer_types_with_mamba(config)
    kinds: dict[str, AttentionSpec | StateSpaceSpec] = {FULL: attending.mixer}
    if LINEAR in types:
        kinds[LINEAR] = state_space_spec(config)
    mlp = _mlp(config)
    layers = tuple(replace(attending, mixer=mixer, mlp=mlp) for mixer in mixers_by_type(config, types, kinds))
    return replace(dense, layers=layers, names=_NAMES)


def _mlp(config: Config) -> MlpSpec | ExpertsSpec:
    """Return the MLP of a layer: alone, or beside experts."""
    shared = MlpSpec(intermediate_size=positive_int(config, "shared_intermediate_size"))
    if not number_of(config, "num_local_experts"):
        return shared
    return ExpertsSpec(
        router=router_spec(config, "num_local_experts", scoring=Scoring.SOFTMAX_OF_CHOSEN),
        inner=positive_int(config, "intermediate_size"),
        shared=shared,
    )
