"""Checks of a model directory before torch is there: its files are whole and fit its network.

It is the first thing of a worker's start. It knows no device and no request.
"""

from pathlib import Path

from engine_worker.model.architectures import spec_from_json
from engine_worker.model.checkpoint import check_checkpoint, stored_tensors
from engine_worker.model.checkpoint_tensors import scale_names
from engine_worker.model.implementation import is_native
from engine_worker.model.quantization_config import refuse_quantized
from engine_worker.model.scale_values import check_scales
from engine_worker.model.sharding import check_one_rank, check_tensor_parallel_size
from shared.model_files import read_model_files


def check_files(
    directory: Path,
    model_impl: str = "auto",
    load_format: str = "auto",
    tensor_parallel_size: int = 1,
    quantization: str = "auto",
) -> None:
    """Raises ValueError: ModelFilesError of the files, and what config.json asks for and no family here has.

    What transformers makes of a config.json is known only when it is loaded. With `load_format` dummy there need be no
    weights.
    """
    files = read_model_files(directory)
    spec = spec_from_json(files.config, files.generation) if is_native(files.config, model_impl) else None
    if spec is not None:
        check_tensor_parallel_size(spec, tensor_parallel_size)
    else:
        refuse_quantized(files.config, quantization)
        check_one_rank(tensor_parallel_size)
    if load_format == "dummy":
        return
    found = stored_tensors(directory)
    if spec is not None:
        check_checkpoint(spec, found)
        check_scales(found[name] for name in scale_names(spec))
