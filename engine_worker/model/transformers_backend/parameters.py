"""A model on the meta device gets its weights from a WeightSource: every tensor by name and shape, or a refusal.

Buffers that no checkpoint has (frequencies of a rotary embedding) are computed by the library itself. They are filled
with values that nobody would compute first, so that one that it forgets is found. Knows nothing of attention. It is
used once, at a worker's start.
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
    """In place. Raises ValueError with the name of a tensor that is missing or has another shape."""
    stored = _stored_names(model, source)
    names: dict[int, list[str]] = defaultdict(list)  # a tied tensor has several
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
                loaded[id(parameter)] = _initialised(nn.Parameter(tensor, requires_grad=False))
            module._parameters[key] = loaded[id(parameter)]
        _load_buffers(model, module, prefix, source, stored)


def num_parameters(model: "PreTrainedModel") -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _stored_names(model: "PreTrainedModel", source: WeightSource) -> dict[str, str]:
    """The model's name of a tensor -> the checkpoint's, where a family was renamed since, or a bare decoder saved."""
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
            module._buffers[key] = _initialised(source.get(stored.get(name, name), tuple(buffer.shape)))
        else:
            raise ModelNotServed(f"through transformers: {name} is a stored buffer of {buffer.dtype}")
    if computed:
        with torch.no_grad():
            model._init_weights(module)
    for name in computed:
        buffer = module.get_buffer(name.rpartition(".")[2])
        if bool(buffer.isnan().any()) or (not buffer.is_floating_point() and not bool(buffer.any())):
            raise ModelNotServed(f"through transformers: nothing computes the buffer {name}")


def _unlikely(buffer: Tensor, device: torch.device) -> Tensor:
    if buffer.is_floating_point():
        return torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device=device)
    return torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)


def _initialised(tensor: Tensor) -> Tensor:
    """The library's own mark of what its initialisation must leave alone."""
    tensor._is_hf_initialized = True
    return tensor
