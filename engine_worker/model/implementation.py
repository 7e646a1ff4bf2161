"""Select the code that runs a model: a family of this repository, or transformers (`--model-impl`).

Both are Blueprints, so callers need not distinguish them. transformers is imported only when it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_worker.model.architectures import has_family, spec_from_json
from engine_worker.model.checkpoint import stored_tensors
from engine_worker.model.checkpoint_tensors import checkpoint_tensors, int4_groups, weights_bytes
from engine_worker.model.grouped_bytes import grouped_weights_bytes
from engine_worker.model.quantization_config import refuse_quantized
from engine_worker.model.sharding import check_tensor_parallel_size, sharded, tensor_parts, with_expert_shares
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.experts import ExpertsSpec
from engine_worker.model.weight_format import STORED_BLOCKS, chosen_format
from shared.model_files import read_model_files

if TYPE_CHECKING:
    from engine_worker.model.served_model import Blueprint, ServedModel
    from engine_worker.model.tensor_parallel import TensorParallel
    from engine_worker.model.weights import WeightSource


@dataclass(frozen=True)
class NativeBlueprint:
    """A model whose family is in this repository."""

    shape: ModelSpec
    implementation: str = "native"
    is_capturable: bool = True
    refused_options: dict[str, str] = field(default_factory=dict)

    def check_tensor_parallel_size(self, size: int) -> None:
        check_tensor_parallel_size(self.shape, size)

    def share(self, size: int) -> ModelSpec:
        return sharded(self.shape, 0, size)

    def weights_bytes(self, size: int, itemsize: int) -> int:
        share = self.share(size)
        stored = share.quantization
        in_blocks = (stored.in_groups or stored.blocks is not None) and not stored.groups
        return grouped_weights_bytes(share, itemsize) if in_blocks else weights_bytes(share, itemsize)

    @property
    def weight_format(self) -> str:
        stored = self.shape.quantization
        if stored.is_online and stored.kind == "int4":
            counts = sorted(int4_groups(self.shape).items(), reverse=True)
            return f"{stored.name} ({', '.join(f'{_group_name(group)}: {count}' for group, count in counts)})"
        return "" if stored.is_dequantized else stored.name

    @property
    def weight_kind(self) -> str:
        stored = self.shape.quantization
        return "" if stored.is_dequantized else stored.kind

    def build(
        self,
        weights: "WeightSource",
        max_len: int,
        is_deterministic: bool,
        tensor_parallel: "TensorParallel | None" = None,
    ) -> "ServedModel":
        from engine_worker.model.network import Network  # noqa: PLC0415 - a shape alone needs no torch

        if tensor_parallel is not None and tensor_parallel.size > 1:
            return self._build_part(weights, max_len, is_deterministic, tensor_parallel)
        model = Network(self.shape, weights, max_len, is_deterministic)
        weights.check_all_used(self.shape.unused)
        return model

    def _build_part(
        self, weights: "WeightSource", max_len: int, is_deterministic: bool, ranks: "TensorParallel"
    ) -> "ServedModel":
        """Build the network of one of several ranks."""
        from engine_worker.model.network import Network  # noqa: PLC0415 - as above
        from engine_worker.model.parallel_linear import ParallelMethod  # noqa: PLC0415
        from engine_worker.model.quantization import linear_method  # noqa: PLC0415
        from engine_worker.model.weights import ShardedWeights  # noqa: PLC0415

        if self.shape.quantization.blocks:
            raise ValueError("--quantization as-stored does not support several ranks; use auto, none or int8")
        spec = sharded(self.shape, ranks.rank, ranks.size)
        stored = linear_method(spec.quantization, weights.device.type, is_deterministic)
        method = ParallelMethod(stored, ranks, spec.vocab_size, is_deterministic)
        parts = tensor_parts(self.shape, ranks.rank, ranks.size)
        own = ShardedWeights(weights, checkpoint_tensors(self.shape), parts)
        model = Network(spec, own, max_len, is_deterministic, method, ranks)
        own.check_all_used(self.shape.unused)
        return model


def blueprint_from_directory(
    directory: Path,
    wanted: str = "auto",
    quantization: str = "auto",
    enable_expert_parallel: bool = False,
    int4_group: int = 0,
) -> "Blueprint":
    """Return the Blueprint of a model directory.

    Args:
        directory: The model directory.
        wanted: auto, native or transformers.
        quantization: auto, none, fp8, mxfp4, int4, int8 or as-stored.
        enable_expert_parallel: Ranks share whole experts.
        int4_group: Inputs per scale of int4 on a GPU; 0: on a CPU.

    Raises:
        ValueError: If config.json has something that is not supported.
    """
    files = read_model_files(directory)
    blocks = directory / STORED_BLOCKS
    stored = blocks if blocks.is_file() else None
    found = blueprint(files.config, files.generation, wanted, quantization, stored, enable_expert_parallel, int4_group)
    has_weights = any(directory.glob("*.safetensors"))
    if not isinstance(found, NativeBlueprint) or found.shape.names.experts.stacked is None or not has_weights:
        return found
    return replace(found, shape=found.shape.with_names_of(stored_tensors(directory)))


def is_native(config: Mapping[str, Any], wanted: str) -> bool:
    """Return whether a family of this repository runs the model."""
    return wanted == "native" or (wanted == "auto" and has_family(config))


def blueprint(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    wanted: str = "auto",
    quantization: str = "auto",
    blocks: Path | None = None,
    enable_expert_parallel: bool = False,
    int4_group: int = 0,
) -> "Blueprint":
    """Return the Blueprint of config.json and generation_config.json; see blueprint_from_directory()."""
    if is_native(config, wanted):
        spec = spec_from_json(config, generation)
        spec = replace(spec, quantization=chosen_format(spec.quantization, quantization, blocks, int4_group))
        has_experts = any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers)
        refused = {} if has_experts else {"enable_expert_parallel": "the model has no experts"}
        return NativeBlueprint(with_expert_shares(spec, enable_expert_parallel), refused_options=refused)
    from engine_worker.model.transformers_backend.network import TransformersBlueprint  # noqa: PLC0415 - takes seconds

    refuse_quantized(config, quantization)
    return TransformersBlueprint.of(config, generation)


def _group_name(group: int) -> str:
    return f"groups of {group}" if group else "in 16 bits"
