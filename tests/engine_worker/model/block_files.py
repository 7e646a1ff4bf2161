"""Write a model directory as the conversion of a GGUF file does: blocks beside the values that they encode."""

from pathlib import Path

import gguf
from safetensors.numpy import load_file, save_file

from engine_worker.model.checkpoint import SINGLE
from engine_worker.model.weight_format import STORED_BLOCKS


def write_stored_blocks(directory: Path, types: dict[str, gguf.GGMLQuantizationType]) -> None:
    """Quantize some tensors of a model, and replace them in model.safetensors."""
    path = directory / SINGLE
    tensors = load_file(path)
    kept = {name: gguf.quantize(tensors[name], type_) for name, type_ in types.items()}
    tensors |= {name: gguf.dequantize(kept[name], type_) for name, type_ in types.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    save_file(kept, directory / STORED_BLOCKS, metadata={name: type_.name for name, type_ in types.items()})
