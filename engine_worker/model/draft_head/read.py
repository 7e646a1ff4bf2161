"""Read the spec of a draft head, and check it against its target, without torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from engine_worker.model.checkpoint import stored_tensors
from engine_worker.model.draft_head.eagle3_spec import Eagle3Spec, eagle3_spec
from engine_worker.model.draft_head.files import DraftHeadFiles
from engine_worker.model.spec import ModelShape, ModelSpec, MtpSpec
from shared.model_files import read_json

DraftHeadSpec: TypeAlias = Eagle3Spec | MtpSpec


def read_draft_head(files: DraftHeadFiles, target: ModelShape, *, load_format: str = "auto") -> DraftHeadSpec:
    """Read a head, and check it against its target.

    Args:
        files: Where it is.
        target: The model that it drafts for.
        load_format: auto or dummy; dummy needs no weights.

    Raises:
        ValueError: If it is not such a head, or does not fit. The message names the setting or the field.
    """
    if not isinstance(target, ModelSpec):
        raise ValueError("--speculative-config: a draft head needs --model-impl native; the model runs in transformers")
    return _READERS[files.method](files.directory, target, load_format != "dummy")


def _read_eagle3(directory: Path, target: ModelSpec, has_weights: bool) -> Eagle3Spec:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"--speculative-config: model: {directory} has no config.json; expected an EAGLE-3 head")
    if has_weights and not any(directory.glob("*.safetensors")):
        raise ValueError(f"--speculative-config: model: {directory} has no *.safetensors")
    return eagle3_spec(read_json(path), target)


def _read_mtp(directory: Path, target: ModelSpec, has_weights: bool) -> MtpSpec:
    mtp = target.mtp
    if mtp is None:
        raise _no_mtp("its family or its config.json has none")
    name = f"{mtp.names.project}.weight"
    if has_weights and name not in stored_tensors(directory, mtp.prefix):
        raise _no_mtp(f"the safetensors files have no {name}")
    return mtp


def _no_mtp(reason: str) -> ValueError:
    return ValueError(
        f"--speculative-config: method: mtp needs a model with a layer for multi-token prediction; {reason}. "
        "Use ngram, suffix or eagle3"
    )


_READERS: Mapping[str, Callable[[Path, ModelSpec, bool], DraftHeadSpec]] = {"eagle3": _read_eagle3, "mtp": _read_mtp}
