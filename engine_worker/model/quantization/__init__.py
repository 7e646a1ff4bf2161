"""Weight formats: one file each, with one LinearMethod per device, imported on demand."""

from torch import Tensor

from engine_worker.model.linear import LinearMethod
from engine_worker.model.weight_format import WeightFormat
from engine_worker.model.weights import WeightSource


def linear_method(stored: WeightFormat, device_type: str, is_deterministic: bool = False) -> LinearMethod:
    """Return the LinearMethod of a format.

    Args:
        stored: The format.
        device_type: `cpu` or `cuda`.
        is_deterministic: Rows must have the same bits in any batch.
    """
    if stored.kind == "mxfp4":
        from engine_worker.model.quantization import mxfp4  # noqa: PLC0415 - only such models need it

        return mxfp4.method(stored, device_type, is_deterministic)
    if stored.kind == "int4" and device_type == "cuda" and not stored.is_dequantized:
        from engine_worker.model.quantization import int4_cuda  # noqa: PLC0415 - imports triton

        return int4_cuda.method(stored, is_deterministic)
    if stored.kind == "int4":
        from engine_worker.model.quantization import grouped  # noqa: PLC0415 - only such models need it

        return grouped.int4_method(stored, device_type, is_deterministic)
    if stored.groups:
        from engine_worker.model.quantization import fp8  # noqa: PLC0415 - only fp8 models need it

        return fp8.method(stored, device_type, is_deterministic)
    if stored.in_groups or stored.blocks:
        return _of_groups(stored, device_type, is_deterministic)
    from engine_worker.model.quantization import dense  # noqa: PLC0415

    return dense.method(device_type, is_deterministic)


def _of_groups(stored: WeightFormat, device_type: str, is_deterministic: bool) -> LinearMethod:
    if device_type == "cuda":
        from engine_worker.model.quantization import blocks_cuda  # noqa: PLC0415 - imports triton

        return blocks_cuda.method(stored, is_deterministic)
    from engine_worker.model.quantization import grouped  # noqa: PLC0415 - only such models need it

    return grouped.method(stored, device_type)


def dense_tensor(source: WeightSource, stored: WeightFormat, name: str, shape: tuple[int, int]) -> Tensor:
    """Return a weight in 16 or 32 bits, dequantized if the checkpoint has it in fp8 or 4 bits."""
    if stored.stored_scheme(name.removesuffix(".weight")) is None:
        return source.get(name, shape)
    from engine_worker.model.quantization.dequantized import DequantizedWeights  # noqa: PLC0415 - as above

    return DequantizedWeights(source, stored).get(name, shape)
