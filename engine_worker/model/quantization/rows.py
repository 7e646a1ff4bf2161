"""Read the rows of a linear layer, whose parts may be several tensors."""

import torch
from torch import Tensor

from engine_worker.model.linear import LinearSpec
from engine_worker.model.weights import WeightSource


def rows_of(spec: LinearSpec, source: WeightSource, part: str, rest: tuple[int, ...]) -> Tensor:
    """Return the rows of all parts, [sum(outputs), *rest], in the layer's row order."""
    parts = [source.get(f"{name}.{part}", (size, *rest)) for name, size in zip(spec.names, spec.sizes, strict=True)]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if spec.row_order is None else rows[spec.row_order.to(rows.device)]
