"""Ways of storing weights: a file each, with one LinearMethod a device. Imported when a model is stored so.

It is used at a worker's start; it knows the ways by their names alone.
"""

from torch import Tensor

from engine_worker.model.linear import LinearMethod
from engine_worker.model.weight_format import WeightFormat
from engine_worker.model.weights import WeightSource


def linear_method(stored: WeightFormat, device_type: str, is_deterministic: bool = False) -> LinearMethod:
    """`device_type`: `cpu` or `cuda`, on which the weights will be; `is_deterministic`: rows have the same bits in any
    batch."""
    if stored.groups:
        from engine_worker.model.quantization import fp8  # noqa: PLC0415 - a model without fp8 needs none of it

        return fp8.method(stored, device_type, is_deterministic)
    if stored.in_groups:
        from engine_worker.model.quantization import grouped  # noqa: PLC0415 - as above

        return grouped.method(stored, device_type)
    from engine_worker.model.quantization import dense  # noqa: PLC0415

    return dense.method(device_type)


def dense_tensor(source: WeightSource, stored: WeightFormat, name: str, shape: tuple[int, int]) -> Tensor:
    """The weight `name` in 16 or 32 bits, whatever the checkpoint has it in."""
    if stored.stored_scheme(name.removesuffix(".weight")) is None:
        return source.get(name, shape)
    from engine_worker.model.quantization.dequantized import DequantizedWeights  # noqa: PLC0415 - as above

    return DequantizedWeights(source, stored).get(name, shape)
