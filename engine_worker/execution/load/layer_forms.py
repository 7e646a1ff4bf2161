"""Name the code that computes a model's layers on a CPU, for `pagestream doctor`. A worker logs the same."""

from collections.abc import Iterator

from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.spec import ModelShape, ModelSpec
from engine_worker.model.specs.experts import ExpertsSpec
from kernels.cpu.step import refused_head


def describe_cpu_layers(settings: ExecutionSettings, why_no_kernels: str) -> tuple[bool, str]:
    """Return whether C++ computes attention, norms and rotary embeddings, and a text with the reason if torch does.

    Args:
        settings: Of the worker.
        why_no_kernels: Why this machine has no C++ kernels; "" if it has them.

    Returns:
        The text is "" if the model cannot be read; the model check reports the cause.
    """
    try:
        shape = blueprint_from_directory(settings.model, settings.model_impl, settings.quantization).shape
    except (OSError, ValueError):
        return False, ""
    reason = why_no_kernels or refused_head(shape.head_dim)
    form = f"torch operators, slower and not batch-invariant: {reason}" if reason else "C++ kernels"
    return not reason, "; ".join((form, *_parts_in_torch(shape)))


def _parts_in_torch(shape: ModelShape) -> Iterator[str]:
    """Yield the parts that have no C++ kernel."""
    if isinstance(shape, ModelSpec) and any(isinstance(layer.mlp, ExpertsSpec) for layer in shape.layers):
        yield "experts: one call per layer with 4- or 8-bit weights, else a loop in torch over the chosen ones"
