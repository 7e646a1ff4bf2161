"""Load dummy weights with seeded routers (router_values.py), and count the experts that a step reads.

The count is part of a comparison: an engine whose router reaches fewer experts reads fewer weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.engine.router_values import RouterValues
from bench.engine.session import EngineSession
from engine_worker.execution.load import load_replica
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.experts import ExpertsSpec
from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.weights import RandomWeights
from shared.messages import SamplingParams

ROWS = (1, 8, 32, 256)
# Where a device chooses experts: module, function, and the experts [T, k] in its result, without a shared one.
_CHOICES: dict[str, tuple[str, str, Callable[..., Tensor]]] = {
    "cpu": (
        "engine_worker.model.quantization.experts_cpu",
        "choose",
        lambda found, _logits, router, *_: found[0][:, : router.top_k],
    ),
    "cuda": (
        "engine_worker.model.quantization.experts_cuda",
        "route",
        lambda found, _x, _weight, router, *_: found.ids[:, : router.top_k],
    ),
}


class SeededRouters(RandomWeights):
    """Random weights, except the weights of routers."""

    def __init__(self, values: RouterValues, names: NamesSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._values, self._suffix = values, f".{names.experts.router}.weight"

    def get(self, name: str, shape: tuple[int, ...], *options: Any, **named: Any) -> Tensor:
        drawn = super().get(name, shape, *options, **named)
        if not name.endswith(self._suffix):
            return drawn
        layer = int(next(part for part in name.split(".") if part.isdecimal()))
        return drawn.copy_(torch.from_numpy(self._values.weight(layer, *shape)))


@dataclass(slots=True)
class ExpertCounts:
    """The chosen experts of the steps inside counting(), one entry per layer with experts."""

    is_counting: bool = False
    chosen: list[Tensor] = field(default_factory=list)  # [T, k] each

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.chosen, self.is_counting = [], True
        try:
            yield
        finally:
            self.is_counting = False


@contextmanager
def seeded_routers(values: RouterValues, names: NamesSpec, device_type: str) -> Iterator[ExpertCounts]:
    """Make a load of dummy weights inside the context use seeded routers, and later steps countable."""
    module_name, function, ids_of = _CHOICES[device_type]
    module, counts = import_module(module_name), ExpertCounts()
    chosen_by = getattr(module, function)

    def counted(*arguments: Any) -> Any:
        found = chosen_by(*arguments)
        if counts.is_counting:
            counts.chosen.append(ids_of(found, *arguments).clone())
        return found

    def weights(device: torch.device, dtype: torch.dtype) -> SeededRouters:
        return SeededRouters(values, names, device, dtype)

    with patch.object(load_replica, "RandomWeights", weights), patch.object(module, function, counted):
        yield counts


def checked_names(settings: ExecutionSettings) -> NamesSpec:
    """Return the names of a model whose routers can be seeded.

    Raises:
        ValueError: If weights are not dummy, there are several ranks, or no layer has experts.
    """
    if settings.load_format != "dummy" or settings.tensor_parallel_size > 1:
        raise ValueError("--router needs --load-format dummy and --tensor-parallel-size 1")
    spec = blueprint_from_directory(settings.model, "native", settings.quantization).shape
    assert isinstance(spec, ModelSpec)
    if not any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers):
        raise ValueError(f"--router: no layer of {settings.model.name} has experts")
    return spec.names


def count_experts(
    counts: ExpertCounts, values: RouterValues, session: EngineSession, prompts: Sequence[list[int]]
) -> Iterator[dict[str, Any]]:
    """Yield one row per number of sequences that run as one step: the distinct experts of each layer.

    Args:
        counts: From seeded_routers().
        values: What the routers have.
        session: The engine.
        prompts: Two tokens each, of which the last is counted; as many as the largest number of sequences.
    """
    # Log-probabilities of the prompt keep a step out of CUDA graphs, which would not call the counted function. They
    # need a second token.
    params = SamplingParams(max_tokens=1, seed=0, ignore_eos=True, temperature=0.0, prompt_logprobs=0)
    for num_rows in (rows for rows in ROWS if rows <= len(prompts)):
        with counts.counting():
            session.run([(prompt, params) for prompt in prompts[:num_rows]])
        distinct = [len(ids[1::2].unique()) for ids in counts.chosen if len(ids) == 2 * num_rows]
        if distinct:
            mean = round(sum(distinct) / len(distinct), 2)
            row = {"what": "distinct_experts", "router": values.kind, "seed": values.seed, "rows": num_rows}
            yield row | {"distinct_experts": distinct, "mean": mean}
