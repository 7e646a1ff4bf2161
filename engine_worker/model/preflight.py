"""Check a model directory without torch: its files are complete and fit the network."""

from pathlib import Path

from engine_worker.model.architectures import spec_from_json
from engine_worker.model.checkpoint import check_checkpoint, stored_tensors
from engine_worker.model.checkpoint_tensors import group_indices, scale_names
from engine_worker.model.draft_head.files import DraftHeadFiles
from engine_worker.model.draft_head.read import read_draft_head
from engine_worker.model.implementation import is_native
from engine_worker.model.quantization_config import refuse_quantized
from engine_worker.model.scale_values import check_group_order, check_scales
from engine_worker.model.sharding import check_one_rank, check_tensor_parallel_size, with_expert_shares
from shared.model_files import checked_max_model_len, read_model_files


def check_files(
    directory: Path,
    model_impl: str = "auto",
    load_format: str = "auto",
    tensor_parallel_size: int = 1,
    quantization: str = "auto",
    enable_expert_parallel: bool = False,
    max_model_len: int | None = None,
) -> None:
    """Check the files.

    What transformers supports is known only when it is loaded.

    Args:
        directory: The model directory.
        model_impl: auto, native or transformers.
        load_format: auto or dummy; dummy needs no weights.
        tensor_parallel_size: Number of ranks.
        quantization: auto, none, fp8, mxfp4, int4, int8 or as-stored.
        enable_expert_parallel: Ranks share whole experts.
        max_model_len: In tokens; None: the model's.

    Raises:
        ValueError: If config.json has something that is not supported. ModelFilesError, a subclass: if files are wrong.
    """
    files = read_model_files(directory)
    spec = spec_from_json(files.config, files.generation) if is_native(files.config, model_impl) else None
    if spec is not None:
        checked_max_model_len(max_model_len, spec.max_position_embeddings)
        check_tensor_parallel_size(with_expert_shares(spec, enable_expert_parallel), tensor_parallel_size)
    else:
        refuse_quantized(files.config, quantization)
        check_one_rank(tensor_parallel_size)
    if load_format == "dummy":
        return
    found = stored_tensors(directory)
    if spec is not None:
        spec = spec.with_names_of(found)
        check_checkpoint(spec, found)
        check_scales(found[name] for name in scale_names(spec))
        for group, names in group_indices(spec).items():
            check_group_order((found[name] for name in names), group)


def check_draft_head(
    head: DraftHeadFiles,
    directory: Path,
    model_impl: str = "auto",
    load_format: str = "auto",
) -> None:
    """Check the files of a draft head against its target in `directory`.

    Raises:
        ValueError: If they do not fit together, or a setting excludes heads.
    """
    files = read_model_files(directory)
    if is_native(files.config, model_impl):  # else the worker refuses heads when it has loaded transformers
        target = spec_from_json(files.config, files.generation)
        read_draft_head(head, target, load_format=load_format)
