"""Load a meta-device model's weights from a WeightSource; every tensor is checked by name and shape.

Buffers without a checkpoint tensor (rotary frequencies) are computed by the library. They are first filled with values
that it would not compute, so that a forgotten one is detected.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine_worker.model.transformers_backend.library import ModelNotServed
from engine_worker.model.weights import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_parameters(model: "PreTrainedModel", source: WeightSource) -> None:
    """Load all parameters in place.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    stored = _stored_names(model, source)
    names: dict[int, list[str]] = defaultdict(list)  # a tied tensor has several names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    loaded: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in loaded:
                own = names[id(parameter)]
                name = next((stored[name] for name in own if name in stored), own[0])
                tensor = source.get(name, tuple(parameter.shape))
                loaded[id(parameter)] = _marked_initialized(nn.Parameter(tensor, requires_grad=False))
            module._parameters[key] = loaded[id(parameter)]
        _load_buffers(model, module, prefix, source, stored)


def num_parameters(model: "PreTrainedModel") -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _stored_names(model: "PreTrainedModel", source: WeightSource) -> dict[str, str]:
    """Return model names -> checkpoint names, for renamed families and bare decoders."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import WeightRenaming, rename_source_key  # noqa: PLC0415

    renamings = [known for known in get_model_conversion_mapping(model) if isinstance(known, WeightRenaming)]
    own = model.state_dict()
    return {rename_source_key(name, renamings, [], model.base_model_prefix, own)[0]: name for name in source.names}


def _load_buffers(
    model: "PreTrainedModel", module: nn.Module, prefix: str, source: WeightSource, stored: Mapping[str, str]
) -> None:
    computed = []
    for key, buffer in module._buffers.items():
        name = f"{prefix}.{key}"
        if buffer is None:
            continue
        if key in module._non_persistent_buffers_set:
            module._buffers[key] = _unlikely(buffer, source.device)
            computed.append(name)
        elif buffer.is_floating_point():
            module._buffers[key] = _marked_initialized(source.get(stored.get(name, name), tuple(buffer.shape)))
        else:
            raise ModelNotServed(
                f"through transformers: the stored buffer {name} has the unsupported dtype {buffer.dtype}"
            )
    if computed:
        with torch.no_grad():
            model._init_weights(module)
    for name in computed:
        buffer = module.get_buffer(name.rpartition(".")[2])
        if bool(buffer.isnan().any()) or (not buffer.is_floating_point() and not bool(buffer.any())):
            raise ModelNotServed(f"through transformers: the buffer {name} is neither stored nor computed")


def _unlikely(buffer: Tensor, device: torch.device) -> Tensor:
    if buffer.is_floating_point():
        return torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device=device)
    return torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)


def _marked_initialized(tensor: Tensor) -> Tensor:
    """Set the library's own mark for tensors that its initialization must not touch."""
    tensor._is_hf_initialized = True
    return tensor
