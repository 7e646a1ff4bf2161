"""Hidden states after each layer of a model, by this engine and by transformers, with one step per prompt."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.network import DecoderLayer, Network
from engine_worker.model.spec import kv_layout
from engine_worker.model.weights import SafetensorsWeights
from tests.engine_worker.execution.reference import load_transformers
from tests.engine_worker.model.named_weights import BLOCK_SIZE, attached, step

NUM_BLOCKS = 5  # blocks of step() and block 0


class Watched(DecoderLayer):
    """A layer that records its output added to the residual."""

    def __init__(self, layer: DecoderLayer, states: list[Tensor]) -> None:
        self._layer, self._states = layer, states

    def __call__(
        self, operators: DeviceStep, hidden: Tensor, residual: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self._layer(operators, hidden, residual, rows)
        self._states.append(hidden + residual)
        return hidden, residual


def ours(directory: Path, prompts: Sequence[list[int]]) -> list[Tensor]:
    """Return the states [T, H] of all prompts after each layer of this engine's network."""
    found = blueprint_from_directory(directory, "native")
    weights = SafetensorsWeights(directory, torch.device("cpu"), torch.float32, lambda share, detail: None)
    model = found.build(weights, 64, is_deterministic=False)
    assert isinstance(model, Network)
    states: list[Tensor] = []
    layers = model._layers
    model._layers = [Watched(layer, states) for layer in layers]
    layout = kv_layout(found.shape, BLOCK_SIZE, "float32", max_groups=1)
    for token_ids in prompts:
        model.forward(step(0, token_ids), attached(model, layout, NUM_BLOCKS))
    return [torch.cat(states[layer :: len(layers)]) for layer in range(len(layers))]


@torch.inference_mode()
def of_transformers(directory: Path, prompts: Sequence[list[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the same of transformers, by hooks: the last state of `output_hidden_states` is already normed."""
    # The default form of experts takes no float64.
    model = load_transformers(directory, dtype=dtype, experts_implementation="eager")
    states: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states.append((output if isinstance(output, Tensor) else output[0])[0].clone())

    layers = model.get_decoder().layers
    for layer in layers:
        layer.register_forward_hook(keep)
    for token_ids in prompts:
        model(torch.tensor([token_ids]))
    return [torch.cat(states[layer :: len(layers)]) for layer in range(len(layers))]
