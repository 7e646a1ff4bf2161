"""Which group of the KV pool each layer belongs to, and the windows of each group."""

from collections.abc import Sequence
from typing import Protocol

from engine_worker.kv.layout import Place


class Windowed(Protocol):
    @property
    def window(self) -> int: ...


class LayerGroups:
    """`places` has the group and the place of each layer, `windows` the distinct windows of each group's layers."""

    def __init__(self, layers: Sequence[Windowed], places: Sequence[Place] = ()) -> None:
        """Group the layers; without `places` they form one group, in their order."""
        self.places = tuple(places) or tuple((0, layer) for layer in range(len(layers)))
        found: dict[int, set[int]] = {}
        for (group, _), layer in zip(self.places, layers, strict=True):
            found.setdefault(group, set()).add(layer.window)
        self.windows = [sorted(found[group]) for group in range(len(found))]
