"""The safetensors files of a model directory by their headers: their tensors, and whether they fit the network.

Missing, surplus, misshapen or unsupported tensors are refused by name before any weight is read and without torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine_worker.model.checkpoint_tensors import checkpoint_forms
from engine_worker.model.grouped_bytes import block_shapes
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.part import Shape
from engine_worker.model.weight_format import INPUT_SCALE, STORED_BLOCKS, WEIGHT_SCALE
from shared.model_files import ModelFilesError, read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_NAMES = 4  # names listed in an error

# Computed (inv_freq) or tied (lm_head) tensors of older exporters, and scales of an fp8 KV cache, which only such a
# cache reads (kv_scales.py).
_IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq", "lm_head.weight", ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale"
)  # fmt: skip
# Parts besides the language model: vision and audio, which are not served, and draft heads, which are read apart.
_OTHER_PARTS = (
    "audio_tower.", "embed_audio.", "embed_vision.", "image_newline", "model.image_newline",
    "model.multi_modal_projector.", "model.vision_tower.", "model.visual.", "mtp.", "multi_modal_projector.",
    "vision_model.", "vision_tower.", "visual.",
)  # fmt: skip
# transformers' names of fp8 scales (`inv` because they are multiplied where others divide).
_SCALES = {".weight_scale_inv": f".{WEIGHT_SCALE}", ".activation_scale": f".{INPUT_SCALE}"}
# A checkpoint of a bare decoder, as sentence-transformers writes.
_BARE = ("embed_tokens.", "layers.", "norm.")
_WRAPPED = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a safetensors file."""

    path: Path
    name: str  # in the file
    shape: Shape
    dtype: str  # in safetensors' notation


def text_name(stored: str) -> str | None:
    """Return the language model's name of a stored tensor, or None for a tensor of another part."""
    return None if stored.startswith(_OTHER_PARTS) else _usual_name(stored)


def _usual_name(stored: str) -> str:
    for suffix, scale in _SCALES.items():
        if stored.endswith(suffix):
            stored = stored.removesuffix(suffix) + scale
    for wrapped, bare in _WRAPPED.items():
        if stored.startswith(wrapped):
            return bare + stored.removeprefix(wrapped)
    return f"model.{stored}" if stored.startswith(_BARE) else stored


def is_ignored(name: str) -> bool:
    """Return whether a tensor may be left unused."""
    return name.endswith(_IGNORED_SUFFIXES)


def stored_tensors(directory: Path, under: str = "") -> dict[str, StoredTensor]:
    """Return the language model's tensors by its own names, or those of any part with the prefix `under`.

    What a converted GGUF file has in blocks only counts as float32 numbers.

    Raises:
        ModelFilesError: If a file is missing or incomplete, or a tensor is stored twice.
    """
    found: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        for tensor in _tensors_in(path):
            name = _usual_name(tensor.name) if under else text_name(tensor.name)
            if name in found:
                raise ModelFilesError(f"{name} is in {found[name].path.name} and in {path.name}")
            if name is not None and name.startswith(under):
                found[name] = tensor
    blocks = directory / STORED_BLOCKS
    if blocks.is_file() and not under:
        for name, shape in block_shapes(blocks).items():
            found.setdefault(name, StoredTensor(blocks, name, shape, "F32"))
    return found


def check_checkpoint(spec: ModelSpec, found: dict[str, StoredTensor]) -> None:
    """Compare the stored tensors with those of the network.

    Raises:
        ModelFilesError: For the first kind of difference, with names.
    """
    wanted, format_name = checkpoint_forms(spec), spec.quantization.name
    for name, tensor in found.items():
        if name in wanted and tensor.dtype not in (dtypes := wanted[name].dtypes):
            needed = f"supported: {', '.join(dtypes)}" if len(dtypes) > 1 else f"{format_name} requires {dtypes[0]}"
            raise ModelFilesError(f"{name} is {tensor.dtype} in {tensor.path.name}; {needed}")
    if missing := [name for name in wanted if name not in found]:
        requirement = f" in {format_name}" if format_name else ""
        raise ModelFilesError(f"the safetensors files have no {_some(missing)}, required by config.json{requirement}")
    for name, form in wanted.items():
        if not is_shape(found[name].shape, form.shape, is_scale=name.endswith((WEIGHT_SCALE, INPUT_SCALE))):
            raise ModelFilesError(f"{name} has shape {found[name].shape}; config.json requires {form.shape}")
    surplus = sorted(name for name in found.keys() - wanted.keys() if not is_ignored(name))
    if surplus := [name for name in surplus if not any(re.search(pattern, name) for pattern in spec.unused)]:
        raise ModelFilesError(f"the network of config.json does not use {_some(surplus)}")


def is_shape(stored: Shape, wanted: Shape, *, is_scale: bool) -> bool:
    """Return whether a shape matches. Some writers give scales trailing dimensions of one element."""
    return stored == wanted or (is_scale and _without_ones(stored) == _without_ones(wanted))


def _without_ones(shape: Shape) -> Shape:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def weight_files(directory: Path) -> list[Path]:
    """Return the files named by the index, or the single file.

    Raises:
        ModelFilesError: If a file is missing, or the index is invalid.
    """
    index = directory / INDEX
    names = [SINGLE]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
            raise ModelFilesError(f"{index}: weight_map must map each tensor to a file in the same directory")
        names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        source = f", required by {INDEX}" if index.is_file() else ""
        raise ModelFilesError(f"{directory} has no {_some(missing)}{source}; only safetensors weights are supported")
    return [directory / name for name in names]


def _tensors_in(path: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                part = file.get_slice(name)
                yield StoredTensor(path, name, tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:  # a header that is truncated, invalid, or larger than the file
        size = path.stat().st_size
        raise ModelFilesError(f"{path} ({size:,} bytes) is not a complete safetensors file: {error}") from error


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _some(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
