"""What the parts of a layer are loaded from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from engine_worker.model.layers import NormShape, RotaryTable
from engine_worker.model.linear import LinearMethod
from engine_worker.model.specs.attention import RopeSpec
from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.tensor_parallel import SINGLE
from engine_worker.model.weights import WeightSource


@dataclass(frozen=True, slots=True)
class LayerSource:
    """The weights of one layer.

    Attributes:
        weights: The checkpoint.
        method: Loads linear layers.
        names: Names of the checkpoint's tensors.
        prefix: Prefix of the layer's names.
        norm: What the norms share.
        tables: Rotary tables of the network.
        index: Index of the layer.
        cache_layers: Its layers of the KV pool.
        state_layer: The recurrent layers before it.
        is_summed: A part's last linear layer sums over the ranks; otherwise the next norm does.
        mixer_inputs: Inputs of the mixer's first linear layer; 0: the hidden size.
        reduce: Sums over the ranks, for a part that is more than one linear layer.
    """

    weights: WeightSource
    method: LinearMethod
    names: NamesSpec
    prefix: str
    norm: NormShape
    tables: Mapping[RopeSpec, RotaryTable]
    index: int
    cache_layers: range
    state_layer: int = 0
    is_summed: bool = True
    mixer_inputs: int = 0
    reduce: Callable[[Tensor], Tensor] = SINGLE.all_reduce
