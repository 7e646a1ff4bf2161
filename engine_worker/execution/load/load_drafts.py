"""Load what makes drafts on the device. A head is checked before weights load, and joined with its target."""

from collections.abc import Callable
from dataclasses import dataclass

from engine_worker.execution.settings import DraftSettings, ExecutionSettings
from engine_worker.execution.step.draft_maker import DraftBounds, DraftMaker
from engine_worker.execution.step.draft_steps import DraftSteps
from engine_worker.execution.step.kv_cache import KVCache
from engine_worker.execution.step.ngram_drafts import NgramDrafts
from engine_worker.model.devices import Device
from engine_worker.model.draft_head.files import DraftHeadFiles
from engine_worker.model.draft_head.head import load_draft_head
from engine_worker.model.draft_head.network import DraftedNetwork
from engine_worker.model.draft_head.read import DraftHeadSpec, read_draft_head
from engine_worker.model.network import Network
from engine_worker.model.served_model import Blueprint, ServedModel
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
from engine_worker.model.weights import RandomWeights, SafetensorsWeights
from kernels.draft_inputs_reference import LastDrafts
from kernels.ngram_drafts_reference import NgramLengths


@dataclass(frozen=True, kw_only=True)
class DraftHeadPlan:
    """A head that was checked against its target."""

    files: DraftHeadFiles
    spec: DraftHeadSpec


def draft_head_plan(drafts: DraftSettings, blueprint: Blueprint, settings: ExecutionSettings) -> DraftHeadPlan | None:
    """Check a head against the target and the settings; None if there is no head.

    Raises:
        ValueError: If they do not fit together; the message names the setting.
    """
    if drafts.head is None:
        return None
    spec = read_draft_head(drafts.head, blueprint.shape, load_format=settings.load_format)
    if not spec.layer.fits(size := settings.tensor_parallel_size):
        raise ValueError(f"--tensor-parallel-size: {size} does not divide the draft head's {spec.layer.sizes}")
    return DraftHeadPlan(files=drafts.head, spec=spec)


def with_draft_head(
    model: ServedModel,
    plan: DraftHeadPlan,
    max_model_len: int,
    settings: ExecutionSettings,
    report: Callable[[float, str], None],
    ranks: TensorParallel = SINGLE,
) -> tuple[DraftedNetwork, int]:
    """Load the head, and return both as one model, and the bytes of the head.

    Raises:
        ValueError: If a tensor of the head is missing, unused or has another shape.
    """
    assert isinstance(model, Network), "checked by draft_head_plan()"
    weights: RandomWeights | SafetensorsWeights
    if settings.load_format == "dummy":
        weights = RandomWeights(model.device, model.dtype)
    else:
        weights = SafetensorsWeights(plan.files.directory, model.device, model.dtype, report, plan.spec.prefix)
    head = load_draft_head(plan.spec, model, weights, max_model_len, ranks)
    return DraftedNetwork(model, head, settings.bounds.max_num_batched_tokens), weights.loaded_bytes


def draft_bounds(drafts: DraftSettings, kv_cache: KVCache, limits: tuple[int, int, int]) -> DraftBounds:
    """Return the bounds of what makes drafts on the device.

    `limits`: rows and tokens of a step, padding included, and of a sequence.
    """
    max_rows, max_tokens, max_model_len = limits
    return DraftBounds(
        num_drafts=drafts.num_drafts,
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        block_size=kv_cache.block_size,
        num_groups=len(kv_cache.layout.groups),
        lookahead=drafts.num_drafts - 1 if drafts.head is not None else 0,
    )


def draft_maker(
    drafts: DraftSettings,
    model: ServedModel,
    device: Device,
    bounds: DraftBounds,
    last: LastDrafts,
    ranks: TensorParallel,
) -> DraftMaker:
    """Return what makes drafts after each step of `model`, whose steps use `device`."""
    if drafts.ngram_lengths is not None:
        return NgramDrafts(NgramLengths(*drafts.ngram_lengths), bounds, last, ranks)
    assert isinstance(model, DraftedNetwork), "with_draft_head() joined them"
    return DraftSteps(model, device, bounds, last)
