"""The tensors of single experts, out of stacked tensors."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from engine_worker.model.linear import ExpertsLoad
from engine_worker.model.specs.part import Part
from engine_worker.model.weights import WeightSource


def expert_source(load: ExpertsLoad, source: WeightSource) -> WeightSource:
    """Return a source that has each expert's tensors under the names of ExpertsLoad.linears()."""
    return StackedExperts(load, source) if load.names.is_stacked else source


class StackedExperts:
    """A source that cuts the tensors of single experts out of stacked ones, which it reads once."""

    def __init__(self, load: ExpertsLoad, source: WeightSource) -> None:
        self._load, self._source = load, source
        self._stacked: dict[str, Tensor] = {}
        self._gate_up, self._down = load.prefix + load.names.gate_up[0], load.prefix + load.names.down
        biases = load.names.gate_up_bias, load.names.down_bias
        self._biases = dict(zip((self._gate_up, self._down), (load.prefix + name for name in biases), strict=True))
        self.device, self.dtype = source.device, source.dtype
        self.names: Collection[str] = source.names

    @property
    def loaded_bytes(self) -> int:
        return self._source.loaded_bytes

    def get(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the tensor of one expert, [outputs, inputs] or [outputs], with gate rows before up rows.

        Other names are those of the shared expert, which has tensors of its own.
        """
        stacked, expert, kind = name.rsplit(".", 2)
        if stacked not in self._biases:
            return self._source.get(name, shape, part, dtype)
        spec, is_weight = self._load.spec, kind == "weight"
        whole = spec.stacked_shape(*shape) if is_weight else (len(spec.experts), *shape)
        tensor = self._whole(stacked if is_weight else self._biases[stacked], whole)[int(expert) - spec.experts.start]
        if spec.transposed and is_weight:
            tensor = tensor.T
        if spec.interleaved and stacked == self._gate_up:
            tensor = torch.cat((tensor[0::2], tensor[1::2]))
        return tensor.contiguous()

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._stacked:
            self._stacked[name] = self._source.get(name, shape)
        return self._stacked[name]

    def keep_as(self, handed_out: int, kept: int) -> None:
        self._source.keep_as(handed_out, kept)

    def leave(self, name: str) -> None:
        self._source.leave(name)

    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        self._source.check_all_used(ignored)
